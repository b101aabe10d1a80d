"""The layers of a decoder that work on each token alone. float32 everywhere; fast twin: `fast/layers.py`.

C is a layer's input width, F its output width; T tokens, H query heads, Hkv KV heads, D head dim.
"""

from __future__ import annotations

import math
from typing import overload

import numpy as np

from reference.contracts.config import RopeScaling
from reference.contracts.rope import rope_frequencies


class Linear:
    """y = x W^T + b, with the weight stored [out, in] as checkpoints store it.

    `weight.T` is a view: BLAS reads the transposed matrix in place, so a memory-mapped weight is never copied.
    """

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None = None) -> None:
        self.weight = weight  # [F, C]
        self.bias = bias  # [F]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[T, C] -> [T, F]."""
        y: np.ndarray = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class RMSNorm:
    """Divide each row by its root mean square, then scale each column.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); residual form as in vLLM's `RMSNorm`.
    """

    def __init__(self, weight: np.ndarray, eps: float) -> None:
        self.weight = weight  # [C]
        self.eps = np.float32(eps)

    @overload
    def __call__(self, x: np.ndarray) -> np.ndarray: ...

    @overload
    def __call__(self, x: np.ndarray, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...

    def __call__(
        self, x: np.ndarray, residual: np.ndarray | None = None
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """[T, C] -> normed [T, C]; with a residual: (normed x + residual, x + residual).

        A row may also be one head of many: [T, H, D] -> [T, H, D] with a weight of [D].
        """
        if residual is None:
            return self._normalise(x)
        x = x + residual  # [T, C]
        return self._normalise(x), x

    def _normalise(self, x: np.ndarray) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)  # [T, 1]
        normed: np.ndarray = self.weight * (x / np.sqrt(mean_square + self.eps))  # [T, C]
        return normed


class LayerNorm:
    """Subtract each row's mean, divide by its standard deviation, then scale and shift each column.

    Source: Ba et al., "Layer Normalization" (2016); residual form as that of `RMSNorm`.
    """

    def __init__(self, weight: np.ndarray, bias: np.ndarray, eps: float) -> None:
        self.weight = weight  # [C]
        self.bias = bias  # [C]
        self.eps = np.float32(eps)

    def __call__(self, x: np.ndarray, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Two [T, C] -> (normed x + residual, x + residual)."""
        x = x + residual  # [T, C]
        centred = x - np.mean(x, axis=-1, keepdims=True)  # [T, C]
        variance = np.mean(centred * centred, axis=-1, keepdims=True)  # [T, 1]
        normed = centred / np.sqrt(variance + self.eps)  # [T, C]
        return self.weight * normed + self.bias, x


class RotaryEmbedding:
    """Turn each pair of numbers (x[i], x[i + D/2]) of a head by an angle that grows with the token's position.

    The dot product of a turned query and a turned key depends only on the distance between them. Pairs are half a head
    apart ("rotate-half", the layout of Hugging Face checkpoints), not adjacent as in the paper.
    Source: Su et al., "RoFormer" (2021); angles in float32 as in transformers' `modeling_rope_utils.py`.
    """

    def __init__(
        self, head_dim: int, max_position: int, theta: float, scaling: RopeScaling | None = None
    ) -> None:
        frequencies = rope_frequencies(head_dim, theta, scaling)  # [D/2], radians per position
        angles = np.arange(max_position, dtype=np.float32)[:, None] * frequencies  # [max_position, D/2]
        length = np.float32(scaling.attention_factor if scaling else 1)  # of a pair, before: 1
        self.cos = np.cos(angles) * length  # [max_position, D/2]
        self.sin = np.sin(angles) * length  # [max_position, D/2]

    def __call__(
        self, positions: np.ndarray, query: np.ndarray, key: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions [T], query [T, H, D], key [T, Hkv, D] -> turned copies of query and key."""
        cos = self.cos[positions][:, None, :]  # [T, 1, D/2], the same for every head
        sin = self.sin[positions][:, None, :]  # [T, 1, D/2]
        return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    x1, x2 = np.split(x, 2, axis=-1)  # each [T, H, D/2]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)  # [T, H, D]


def swiglu(x: np.ndarray, gate_up_proj: tuple[Linear, Linear]) -> np.ndarray:
    """silu(gate) * up, where silu(x) = x / (1 + e^-x): [T, C] -> [T, F].

    Args:
        x: [T, C].
        gate_up_proj: the projections to gate and up, each [F, C].

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """
    gate, up = (proj(x) for proj in gate_up_proj)  # each [T, F]
    with np.errstate(over="ignore"):  # e^-x is inf below -88, and x / inf = -0 is the right limit
        activated: np.ndarray = gate / (1 + np.exp(-gate)) * up  # [T, F]
    return activated


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the chance that a standard normal number is below x, by the tanh formula: [T, F] -> [T, F].

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016).
    """
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)  # [T, F]
    activated: np.ndarray = np.float32(0.5) * x * (1 + np.tanh(inner))  # [T, F]
    return activated
