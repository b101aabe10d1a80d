"""Ragged batches over a paged cache for the ladders of attention: decoded tokens, and chunks of prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fast.ladder import Ladder
from tests.kernels import oracles
from tests.kernels.ladders import DTYPES, padded, poisoned, random


@dataclass(frozen=True)
class PagedBatch:
    """Arguments of one call. Blocks are scattered, and every slot that no token owns holds NaN.

    `operation` is the ladder: "prefill_attention", or "paged_attention" for one query row a sequence.
    """

    operation: str
    query: torch.Tensor  # [T, H, D]
    k_cache: torch.Tensor  # [N, B, Hkv, D]
    v_cache: torch.Tensor  # [N, B, Hkv, D]
    block_tables: torch.Tensor  # [S, max_blocks]
    query_start_loc: torch.Tensor  # [S + 1]
    seq_lens: torch.Tensor  # [S]
    window: int = 0

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1]) ** -0.5

    def run(self, ladder: Ladder, rung: str) -> torch.Tensor:
        out = padded(torch.full_like(self.query, float("nan")), 16)
        cache = (self.k_cache, self.v_cache, self.block_tables)
        starts = () if self.operation == "paged_attention" else (self.query_start_loc,)
        call = getattr(ladder, self.operation)
        call(out, padded(self.query, 8), *cache, *starts, self.seq_lens, self.scale, self.window, rung)
        return out

    def first_seen(self, seq: int) -> int:
        """The first position that the sequence's first row sees."""
        rows = int(self.query_start_loc[seq + 1] - self.query_start_loc[seq])
        return max(0, int(self.seq_lens[seq]) - rows + 1 - self.window) if self.window else 0

    def without_unseen_blocks(self) -> PagedBatch:
        """The same batch with -1 for every block wholly left of the window."""
        tables = self.block_tables.clone()
        for s in range(len(self.seq_lens)):
            tables[s, : self.first_seen(s) // self.k_cache.shape[1]] = -1
        return replace(self, block_tables=tables)

    def expected(self) -> oracles.Floats:
        numbers = (self.query, self.k_cache, self.v_cache)
        places = (self.block_tables, self.query_start_loc, self.seq_lens)
        return oracles.paged_attention(
            *(x.double().numpy() for x in numbers),
            *(x.numpy().astype(np.int64) for x in places),
            scale=self.scale,
            sliding_window=self.window or None,
        )


def make_chunks(
    chunks: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> PagedBatch:
    """`chunks` are (tokens in the cache, query rows) of each sequence."""
    needed = [-(-length // block_size) for length, _ in chunks]
    num_blocks = sum(needed) + 2
    shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    tables = torch.full((len(chunks), max(needed) + 1), -1, dtype=torch.int32)  # -1 must not be read
    k_cache, v_cache = (poisoned(num_blocks, block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    used = 0
    for s, ((length, _), count) in enumerate(zip(chunks, needed, strict=True)):
        blocks = shuffled[used : used + count]
        tables[s, :count] = blocks
        used += count
        slots = (blocks.long()[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
        for cache, offset in ((k_cache, 1000), (v_cache, 2000)):
            rows = random(length, kv_heads, head_dim, dtype=dtype, seed=seed + offset + s)
            cache.view(-1, kv_heads, head_dim)[slots] = rows
    starts = np.cumsum([0, *(rows for _, rows in chunks)])
    return PagedBatch(
        "prefill_attention",
        random(int(starts[-1]), heads, head_dim, dtype=dtype, seed=seed + 3000),
        k_cache,
        v_cache,
        tables,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([length for length, _ in chunks], dtype=torch.int32),
    )


def make_decode(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> PagedBatch:
    """The newest token of sequences of these lengths, 0 for a row that only pads."""
    chunks = [(length, 1) for length in lengths]
    batch = make_chunks(chunks, heads, kv_heads, head_dim, block_size, dtype, seed)
    return replace(batch, operation="paged_attention")


def random_batch(operation: str, seed: int) -> PagedBatch:
    """Ragged, with every other number drawn too; types take turns. The emulator is slow: prompts are short."""
    rng = np.random.default_rng(seed)
    decode = operation == "paged_attention"
    kv_heads, group = (int(rng.integers(1, most)) for most in ((4, 7) if decode else (3, 4)))
    lengths = rng.integers(1, 300 if decode else 80, size=int(rng.integers(1, 4 if decode else 5))).tolist()
    chunks = [(length, 1 if decode else int(rng.integers(0, min(length, 25) + 1))) for length in lengths]
    head_dim, block_size = int(rng.choice([64, 128, 96])), int(rng.choice([8, 16, 32]))
    dtype = DTYPES[seed % 3]
    return replace(
        make_chunks(chunks, kv_heads * group, kv_heads, head_dim, block_size, dtype, seed),
        operation=operation,
    )
