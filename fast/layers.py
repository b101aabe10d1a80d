"""The layers of a decoder that work on each token alone. Twin: `reference/layers.py`.

What differs:

- `Linear` keeps the weight in the type of its file (4, 8, 16 or 32 bits) and decodes it in registers: a step is
  bounded by the bytes that it reads. Every output is summed in one order, whatever the batch. One Zen 5 core, one
  matrix [1536, 576] in its cache, us a call; the multipliers alone need 6.8 a row with AVX-512:

        T                 1     2     4     8    16    64
        Q4_1, AVX-512    17    21    37    66   131   466
        F32, AVX-512     30    31    32    62   115   498
        Q4_1, AVX2       36    50    78   145   249   936
- `RMSNorm` adds the residual and normalises in one pass over each row, in place: the row is read once, while
  it is in the cache. Heads are normalised in place, in slices of the fused projection.
- `LayerNorm` does the same with mean and variance.
- `RotaryEmbedding` turns query and key in place, in slices of the fused projection.
- `swiglu` takes the silu of a tile of the gate and multiplies by the same tile of up while both are in the cache:
  neither projection is ever written.
- `gelu` has a vectorised exponential, as which its tanh is written. On two Zen 5 cores, us a call for [T, 3072],
  next to torch, whose gelu also gives a row other bits in another batch when its width is no multiple of the
  vector:

        T                 1     8    32   512
        torch gelu      4.5    30   120   905
        gelu            1.3   4.8    43   294

C is a layer's input width, F its output width; T tokens, H query heads, Hkv KV heads, D head dim.
"""

from __future__ import annotations

from typing import overload

import numpy as np
import torch

from fast import kernels
from fast.kernels import PackedMatrix
from reference.contracts.config import RopeScaling
from reference.contracts.rope import rope_frequencies


class Linear:
    """y = x W^T + b, with the weight stored [out, in] as checkpoints store it, and packed for the kernel."""

    def __init__(self, weight: torch.Tensor | PackedMatrix, bias: torch.Tensor | None = None) -> None:
        if isinstance(weight, torch.Tensor):
            weight = kernels.pack([("F32", weight.contiguous().view(torch.uint8))], weight.shape[1])
        self.weight = weight  # [F, C]
        self.bias = bias  # [F]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, F]."""
        y = kernels.empty(len(x), self.weight.out_features)  # [T, F]
        kernels.linear(y, x, self.weight, self.bias)
        return y


class RMSNorm:
    """Divide each row by its root mean square, then scale each column.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); residual form as in vLLM's
    `RMSNorm`.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight  # [C]
        self.eps = eps

    @overload
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @overload
    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[T, C] -> normed [T, C]; with a residual, in place: (normed x + residual, x + residual).

        A row may also be one head of many, in place: [T, H, D] -> [T, H, D] with a weight of [D].
        """
        if x.dim() == 3:
            kernels.head_rms_norm(x, self.weight, self.eps)
            return x
        if residual is None:
            normed = kernels.empty(*x.shape)  # [T, C]
            kernels.rms_norm(normed, x, self.weight, self.eps)
            return normed
        kernels.fused_add_rms_norm(x, residual, self.weight, self.eps)
        return x, residual


class LayerNorm:
    """Subtract each row's mean, divide by its standard deviation, then scale and shift each column.

    Source: Ba et al., "Layer Normalization" (2016); residual form as that of `RMSNorm`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight = weight  # [C]
        self.bias = bias  # [C]
        self.eps = eps

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two [T, C], in place -> (normed x + residual, x + residual)."""
        kernels.fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)
        return x, residual


class RotaryEmbedding:
    """Turn each pair of numbers (x[i], x[i + D/2]) of a head by an angle that grows with the token's
    position.

    The table is computed with NumPy in float32, operation by operation as the twin does: at position 8000 a
    float32 angle is rounded by up to 2^-12 radians, and two libraries need not round alike.
    """

    def __init__(
        self, head_dim: int, max_position: int, theta: float, scaling: RopeScaling | None = None
    ) -> None:
        frequencies = rope_frequencies(head_dim, theta, scaling)  # [D/2], radians per position
        angles = np.arange(max_position, dtype=np.float32)[:, None] * frequencies  # [max_position, D/2]
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)  # [max_position, D]
        table *= np.float32(scaling.attention_factor if scaling else 1)
        self.cos_sin_cache = kernels.place(torch.from_numpy(table))

    def __call__(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [T], query [T, H, D], key [T, Hkv, D] -> query and key, turned in place."""
        kernels.rotary_embedding(positions, query, key, self.cos_sin_cache)
        return query, key


def swiglu(x: torch.Tensor, gate_up_proj: Linear) -> torch.Tensor:
    """silu(gate) * up, where silu(x) = x / (1 + e^-x): [T, C] -> [T, F].

    Args:
        x: [T, C].
        gate_up_proj: the projections to gate and up as one, [2F, C], packed of these two parts.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    activated = kernels.empty(len(x), gate_up_proj.weight.out_features // 2)  # [T, F]
    kernels.linear_silu_and_mul(activated, x, gate_up_proj.weight, gate_up_proj.bias)
    return activated


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x times the chance that a standard normal number is below x, by the tanh formula, in place: [T, F] -> [T, F].

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).
    """
    kernels.gelu(x, x)
    return x
