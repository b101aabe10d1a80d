"""The functions of `fast.kernels` on a device: torch for the matrix products, the CUDA kernels for the rest.

Names, arguments and meaning are those of `fast.kernels`, where they are documented; `kernels.using` puts one in place
of the other. What differs:

- Data has the dtype of this object, float32 or bfloat16, and arithmetic is float32; the CPU has float32 alone.
- Matrices are unpacked when they are loaded: a GPU's matrix units multiply no packed weights.
- A row's bits may depend on its batch: torch picks a matrix product by its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fast.ladder import Ladder

Unpack = Callable[[Sequence[tuple[str, torch.Tensor]], int], torch.Tensor]


@dataclass(frozen=True)
class DeviceMatrix:
    """A weight matrix as numbers. It has the attributes of `kernels.PackedMatrix`."""

    numbers: torch.Tensor  # [F, C]

    @property
    def in_features(self) -> int:
        return self.numbers.shape[1]

    @property
    def out_features(self) -> int:
        return self.numbers.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.numbers.nbytes


@dataclass(frozen=True)
class DeviceKernels:
    """Runs the models' operations on one device.

    Attributes:
        ladder: the CUDA kernels.
        memory: where tensors live: the CPU's memory for the emulator.
        dtype: of weights, activations and the KV cache.
        unpack: packed rows, as `kernels.pack` takes them, to float32 [F, C] in the CPU's memory.

    A GPU's products of float32 are exact: TF32, which keeps 10 of their 23 bits, is switched off for the process.
    """

    ladder: Ladder
    memory: torch.device
    dtype: torch.dtype
    unpack: Unpack

    def __post_init__(self) -> None:
        if self.memory.type == "cuda":
            torch.set_float32_matmul_precision("highest")

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.memory, self.dtype)

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.memory)

    def empty_cache(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.memory)

    def empty_host_cache(self, *shape: int) -> torch.Tensor:
        """Pinned for a GPU: its kernels read and write it over the bus."""
        return torch.zeros(shape, dtype=self.dtype, pin_memory=self.memory.type == "cuda")

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.memory, non_blocking=True)

    def pack(self, parts: Sequence[tuple[str, torch.Tensor]], in_features: int) -> DeviceMatrix:
        return DeviceMatrix(self.unpack(parts, in_features).to(self.memory, self.dtype))

    def linear(
        self, out: torch.Tensor, x: torch.Tensor, weight: DeviceMatrix, bias: torch.Tensor | None = None
    ) -> None:
        if bias is None:
            torch.mm(x, weight.numbers.t(), out=out)
        else:
            torch.addmm(bias, x, weight.numbers.t(), out=out)

    def linear_silu_and_mul(
        self, out: torch.Tensor, x: torch.Tensor, weight: DeviceMatrix, bias: torch.Tensor | None = None
    ) -> None:
        gate_up = self.empty(len(x), weight.out_features)  # [T, 2F]
        self.linear(gate_up, x, weight, bias)
        self.ladder.silu_and_mul(out, gate_up)

    def embedding(self, out: torch.Tensor, ids: torch.Tensor, weight: DeviceMatrix) -> None:
        torch.index_select(weight.numbers, 0, ids, out=out)

    def position_embedding(self, out: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
        torch.index_select(table, 0, positions, out=out)

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self.ladder.reshape_and_cache(key, value, k_cache, v_cache, slot_mapping)

    def paged_attention(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        sliding_window: int | None = None,
    ) -> None:
        window = sliding_window or 0
        if len(query) == len(seq_lens):  # every sequence has one query: a decode step
            self.ladder.paged_attention(out, query, k_cache, v_cache, block_tables, seq_lens, scale, window)
            return
        self.ladder.prefill_attention(
            out, query, k_cache, v_cache, block_tables, query_start_loc, seq_lens, scale, window
        )

    def copy_blocks(self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_mapping: torch.Tensor) -> None:
        self.ladder.copy_blocks(k_cache, v_cache, block_mapping)

    def swap_blocks(self, source: torch.Tensor, target: torch.Tensor, block_mapping: torch.Tensor) -> None:
        self.ladder.swap_blocks(source, target, block_mapping)

    def rms_norm(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self.ladder.rms_norm(out, x, weight, eps)

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        heads = x.reshape(-1, x.shape[2])  # [T * H, D]: rows with one distance, so a copy where x is a slice
        self.ladder.rms_norm(heads, heads, weight, eps)
        if heads.data_ptr() != x.data_ptr():
            x.copy_(heads.view(x.shape))

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        self.ladder.fused_add_rms_norm(x, residual, weight, eps)

    def layer_norm(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> None:
        self.ladder.layer_norm(out, x, weight, bias, eps)

    def fused_add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> None:
        residual.add_(x)
        self.ladder.layer_norm(x, residual, weight, bias, eps)

    def rotary_embedding(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin_cache: torch.Tensor
    ) -> None:
        self.ladder.rotary_embedding(positions, query, key, cos_sin_cache)

    def silu_and_mul(self, out: torch.Tensor, gate_up: torch.Tensor) -> None:
        self.ladder.silu_and_mul(out, gate_up)

    def gelu(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self.ladder.gelu(out, x)

    def apply_token_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bitmasks: torch.Tensor) -> None:
        shifts = torch.arange(32, dtype=torch.int32, device=bitmasks.device)
        bits = (bitmasks[:, :, None] >> shifts) & 1  # [P, W, 32]
        masked = logits.index_select(0, rows)  # [P, V]
        keeps = bits.view(len(rows), -1)[:, : masked.shape[1]].bool() | masked.isnan().any(1, keepdim=True)
        logits.index_copy_(0, rows, masked.masked_fill_(~keeps, -torch.inf))

    def process_logits(self, logits: torch.Tensor, *steps: Any) -> None:
        self.ladder.process_logits(logits, *steps)

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
        output_positions: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self.ladder.sample(logits, temperature, top_k, top_p, min_p, seeds, output_positions, out)
