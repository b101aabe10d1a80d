"""The CUDA kernels of `csrc/kernels`, each a ladder of rungs from naive to fast: `kernels.ladder("simt")` has them.

An operation that the CPU has too is described there, in `fast/kernels.py`: the same tensors in the same shapes, with
what differs given here. Data is float32, float16 or bfloat16, one of them in all tensors of a call, and computed in
float32. A tensor described as "rows" may have any stride between its outermost entries; everything else must be
contiguous.

Every method takes `rung`, a name out of `Ladder.rungs`; "" is the highest that takes the call. The cards at the head
of the .cuh files say what each rung does and why it is faster. Every method raises ValueError for a bad tensor, an
index out of range or a rung that cannot take the call, before anything is written, and RuntimeError for what the
emulator finds wrong in a kernel: block, thread, file and line are in the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class Ladder:
    """All kernels of one device.

    Attributes:
        module: the compiled module: `fast._cuda`, on tensors of a GPU and its current stream, or `fast._simt`, the
            emulator, on tensors of the CPU; the other attributes are the emulator's.
        seed: 0 runs the threads of a block in ascending order; any other number draws a new order for each round
            between two barriers. A correct kernel gives the same values for every seed.
        threads: OS threads that blocks are spread over.
        architecture: the GPU whose launch limits hold: "sm_80", "sm_86", "sm_89" or "sm_90".
    """

    module: ModuleType
    seed: int = 0
    threads: int = 1
    architecture: str = "sm_80"
    _how: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown architecture, no thread at all, or a seed outside [0, 2 ** 64)."""
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed: expected an unsigned 64-bit number, got {self.seed}.")
        is_gpu = (
            self.module.__name__ == "fast._cuda"
        )  # which has nothing to choose; launches go to the current stream
        launch = (
            self.module.Launch() if is_gpu else self.module.Launch(self.seed, self.threads, self.architecture)
        )
        object.__setattr__(self, "_how", launch)

    @property
    def rungs(self) -> Mapping[str, tuple[str, ...]]:
        """Operation -> the names of its rungs, from naive to fast."""
        names: Mapping[str, tuple[str, ...]] = self.module.rungs()
        return names

    @property
    def claims(self) -> Mapping[str, tuple[str, ...]]:
        """Operation -> for each rung the figure of `KernelCounts` that it makes smaller; "" for the first."""
        figures: Mapping[str, tuple[str, ...]] = self.module.claims()
        return figures

    def rms_norm(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, rung: str = ""
    ) -> None:
        """Arguments as in `kernels.rms_norm`."""
        self.module.rms_norm(out, x, weight, eps, rung, self._how)

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, rung: str = ""
    ) -> None:
        """Arguments as in `kernels.fused_add_rms_norm`; the norm sees the residual as it was rounded.

        Rungs are those of "rms_norm".
        """
        self.module.fused_add_rms_norm(x, residual, weight, eps, rung, self._how)

    def layer_norm(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        rung: str = "",
    ) -> None:
        """Arguments as in `kernels.layer_norm`."""
        self.module.layer_norm(out, x, weight, bias, eps, rung, self._how)

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        rung: str = "",
    ) -> None:
        """Arguments as in `kernels.reshape_and_cache`, but slots must be distinct, and slot -1 writes nothing.

        Rungs are those of "cache_write".
        """
        self.module.reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, rung, self._how)

    def copy_blocks(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_mapping: torch.Tensor, rung: str = ""
    ) -> None:
        """Arguments as in `kernels.copy_blocks`."""
        self.module.copy_blocks(k_cache, v_cache, block_mapping, rung, self._how)

    def swap_blocks(
        self, source: torch.Tensor, target: torch.Tensor, block_mapping: torch.Tensor, rung: str = ""
    ) -> None:
        """Arguments as in `kernels.swap_blocks`, source and target in different memory.

        On a GPU one of the two may lie in pinned memory of the host.
        """
        self.module.swap_blocks(source, target, block_mapping, rung, self._how)

    def paged_attention(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int = 0,
        rung: str = "",
    ) -> None:
        """Attention of one query a sequence, its newest token, over the paged cache: the decode step.

        `kernels.paged_attention` with S = T and no offsets, D at most 256; window 0 is all tokens. A sequence of length
        0 gives zeros.

        Args:
            out: [S, H, D], rows, written.
            query: [S, H, D], rows.
            seq_lens: int32 [S], tokens in the cache, the query's own included.
        """
        self.module.paged_attention(
            out, query, k_cache, v_cache, block_tables, seq_lens, scale, window, rung, self._how
        )

    def prefill_attention(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int = 0,
        rung: str = "",
    ) -> None:
        """Arguments as in `kernels.paged_attention`, D at most 256; window 0 is all tokens."""
        self.module.prefill_attention(
            out,
            query,
            k_cache,
            v_cache,
            block_tables,
            query_start_loc,
            seq_lens,
            scale,
            window,
            rung,
            self._how,
        )

    def silu_and_mul(self, out: torch.Tensor, gate_up: torch.Tensor, rung: str = "") -> None:
        """Arguments as in `kernels.silu_and_mul`. Rungs are those of "silu_mul"."""
        self.module.silu_and_mul(out, gate_up, rung, self._how)

    def gelu(self, out: torch.Tensor, x: torch.Tensor, rung: str = "") -> None:
        """Arguments as in `kernels.gelu`."""
        self.module.gelu(out, x, rung, self._how)

    def rotary_embedding(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        rung: str = "",
    ) -> None:
        """Arguments as in `kernels.rotary_embedding`, D at most 256; `cos_sin_cache` is always float32.

        Rungs are those of "rotary".
        """
        self.module.rotary_embedding(positions, query, key, cos_sin_cache, rung, self._how)

    def softmax(self, out: torch.Tensor, x: torch.Tensor, rung: str = "") -> None:
        """out = exp(x - max(x)) / sum(exp(x - max(x))) for each row.

        Args:
            out: [R, V], rows, written; may be `x`.
            x: [R, V], rows.
        """
        self.module.softmax(out, x, rung, self._how)

    def argmax(self, out: torch.Tensor, x: torch.Tensor, rung: str = "") -> None:
        """out = the index of each row's largest number, the lowest of equals; -1 for a row with a NaN.

        Args:
            out: int64 [R], written.
            x: [R, V], rows, V at least 1.
        """
        self.module.argmax(out, x, rung, self._how)

    def philox(
        self, out: torch.Tensor, seeds: torch.Tensor, output_positions: torch.Tensor, rung: str = ""
    ) -> None:
        """The random words of token ids 0 .. V-1: bit for bit those behind `reference.contracts.noise.gumbel_noise`.

        Args:
            out: int32 [R, V], rows, written: bit patterns of unsigned words.
            seeds: int64 [R], bit patterns of unsigned 64-bit seeds.
            output_positions: int64 [R], below 2 ** 32.
        """
        self.module.philox(out, seeds, output_positions, rung, self._how)

    def process_logits(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        allowed_starts: torch.Tensor,
        allowed_ids: torch.Tensor,
        masked_starts: torch.Tensor,
        masked_ids: torch.Tensor,
        biased_starts: torch.Tensor,
        biased_ids: torch.Tensor,
        biases: torch.Tensor,
        seen_starts: torch.Tensor,
        seen_ids: torch.Tensor,
        counts: torch.Tensor,
        repetition_penalty: torch.Tensor,
        presence_penalty: torch.Tensor,
        frequency_penalty: torch.Tensor,
        rung: str = "",
    ) -> None:
        """Arguments as in `kernels.process_logits`, logits in float32, ids of a list distinct.

        Rungs are those of "penalties".
        """
        self.module.process_logits(
            logits,
            rows,
            allowed_starts,
            allowed_ids,
            masked_starts,
            masked_ids,
            biased_starts,
            biased_ids,
            biases,
            seen_starts,
            seen_ids,
            counts,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            rung,
            self._how,
        )

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
        rung: str = "",
    ) -> None:
        """Arguments as in `kernels.sample`, computed in float64 from logits of any of the types.

        Rungs are those of "topk_topp_sample".
        """
        self.module.sample(
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            output_positions,
            out,
            rung,
            self._how,
        )
