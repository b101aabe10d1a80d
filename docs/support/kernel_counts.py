"""What the attention kernels ask memory for: real runs under the emulator's trace (docs/kernels.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from fast import kernels
from fast.kernel_trace import SECTOR_BYTES, KernelTrace, SiteCounts, WarpEvent

HEAD_DIM, BLOCK_SIZE = 64, 16


@dataclass(frozen=True)
class Attention:
    """One traced call of attention; K and V are its k_cache and v_cache."""

    trace: KernelTrace
    least_bytes: int  # of K and V of the context, each once

    def reads(self, *arrays: str) -> list[SiteCounts]:
        return [count for count in self.trace.by_site if count.did == "read" and count.array in arrays]

    def bytes(self, *arrays: str) -> int:
        """In the sectors that the loads of warps touch."""
        return SECTOR_BYTES * sum(count.sectors for count in self.reads(*arrays))

    @property
    def loads(self) -> int:
        """Loads of K and V, counted once a warp."""
        return sum(count.instructions for count in self.reads("k_cache", "v_cache"))

    @property
    def lanes(self) -> float:
        """That take part in a load of K and V, on average."""
        return sum(count.lanes for count in self.reads("k_cache", "v_cache")) / self.loads

    @property
    def times_the_least(self) -> float:
        return self.bytes("k_cache", "v_cache") / self.least_bytes

    @property
    def blocks(self) -> int:
        """Blocks of threads of the first kernel, which is the one that reads K and V."""
        x, y, z = self.trace.launches[0].grid
        return x * y * z

    def first_load(self, array: str) -> WarpEvent:
        return next(
            event for event in self.trace.events if event.did == "read" and set(event.arrays) == {array}
        )


@cache
def decode(rung: str, num_seqs: int, num_heads: int, num_kv_heads: int, context: int) -> Attention:
    """A decode step of sequences that all have `context` tokens."""
    query, k_cache, v_cache, tables = _arguments(num_seqs, num_heads, num_kv_heads, context, num_seqs)
    lengths = torch.full((num_seqs,), context, dtype=torch.int32)
    arguments = (torch.empty_like(query), query, k_cache, v_cache, tables, lengths, HEAD_DIM**-0.5)
    return _traced("paged_attention", arguments, rung, num_seqs * context * num_kv_heads)


@cache
def prefill(rung: str, num_tokens: int, num_heads: int, num_kv_heads: int, context: int) -> Attention:
    """The newest `num_tokens` of one sequence of `context` tokens."""
    query, k_cache, v_cache, tables = _arguments(num_tokens, num_heads, num_kv_heads, context, 1)
    starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, num_tokens], [context]))
    arguments = (torch.empty_like(query), query, k_cache, v_cache, tables, starts, lengths, HEAD_DIM**-0.5)
    return _traced("prefill_attention", arguments, rung, context * num_kv_heads)


def _arguments(
    num_tokens: int, num_heads: int, num_kv_heads: int, context: int, num_seqs: int
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    blocks = -(-context // BLOCK_SIZE)
    shape = (num_seqs * blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM)
    query, k_cache, v_cache = (
        torch.randn(size, generator=generator) for size in ((num_tokens, num_heads, HEAD_DIM), shape, shape)
    )
    tables = torch.randperm(num_seqs * blocks, generator=generator).to(torch.int32).reshape(num_seqs, blocks)
    return query, k_cache, v_cache, tables


def _traced(operation: str, arguments: tuple[object, ...], rung: str, positions: int) -> Attention:
    trace = kernels.trace_kernel(kernels.ladder("simt"), operation, *arguments, rung=rung)
    return Attention(trace, 2 * 4 * positions * HEAD_DIM)
