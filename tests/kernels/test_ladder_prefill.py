"""prefill_attention, rung by rung, under the emulator: ragged chunks of prompts against the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fast import kernels
from fast.ladder import Ladder
from tests.kernels import oracles
from tests.kernels.ladders import (
    ATTENTION,
    ORDERS,
    Rung,
    assert_attention,
    every_dtype,
    every_rung,
    padded,
    poisoned,
    random,
    rungs_of,
)
from tests.kernels.oracles import assert_close


@dataclass(frozen=True)
class Chunks:
    """Arguments of one call. Blocks are scattered, and every slot that no token owns holds NaN."""

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
        ladder.prefill_attention(
            out,
            padded(self.query, 8),
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
            self.scale,
            self.window,
            rung,
        )
        return out

    def first_seen(self, seq: int) -> int:
        """The first position that the sequence's first row sees."""
        rows = int(self.query_start_loc[seq + 1] - self.query_start_loc[seq])
        return max(0, int(self.seq_lens[seq]) - rows + 1 - self.window) if self.window else 0

    def expected(self) -> oracles.Floats:
        block_size = self.k_cache.shape[1]
        out = np.zeros(tuple(self.query.shape))
        for s, length in enumerate(self.seq_lens.tolist()):
            rows = slice(int(self.query_start_loc[s]), int(self.query_start_loc[s + 1]))
            positions = torch.arange(self.first_seen(s), length)
            blocks = self.block_tables[s].long()[positions // block_size]
            keys, values = (
                cache[blocks, positions % block_size].double().numpy()  # [n, Hkv, D]
                for cache in (self.k_cache, self.v_cache)
            )
            query = self.query[rows].double().numpy()
            out[rows] = oracles.attention(query, keys, values, self.scale, self.window or None)
        return out


def make_chunks(
    chunks: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> Chunks:
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
    return Chunks(
        random(int(starts[-1]), heads, head_dim, dtype=dtype, seed=seed + 3000),
        k_cache,
        v_cache,
        tables,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([length for length, _ in chunks], dtype=torch.int32),
    )


# A whole prompt, a chunk behind cached blocks, a decoded token, a sequence with nothing to compute, a whole tile.
MIXED = [(37, 37), (50, 20), (33, 1), (10, 0), (16, 16)]


@every_rung("prefill_attention")
@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_ragged_batch_of_chunks_equals_the_oracle(rung: Rung, dtype: torch.dtype, head_dim: int) -> None:
    batch = make_chunks(MIXED, 3, 1, head_dim, 16, dtype)
    assert_attention(batch.run, batch.expected(), rung, dtype)


@every_rung("prefill_attention")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (4, 4, 80, 8, torch.float32),
        (5, 1, 33, 32, torch.bfloat16),
        (2, 2, 5, 1, torch.float16),
        (2, 1, 256, 4, torch.float32),
        (6, 3, 64, 32, torch.float16),
        (20, 1, 64, 8, torch.bfloat16),  # pairs of one row in two tiles
        (7, 1, 128, 8, torch.bfloat16),
    ],
)
def test_any_head_dim_block_size_and_number_of_heads_equals_the_oracle(
    rung: Rung, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    batch = make_chunks([(21, 9), (18, 18)], heads, kv_heads, head_dim, block_size, dtype, seed=head_dim)
    assert_attention(batch.run, batch.expected(), rung, dtype)


@every_rung("prefill_attention")
@pytest.mark.parametrize("window", [1, 16, 40, 1000])
def test_a_window_sees_only_the_newest_tokens_and_never_reads_blocks_left_of_it(
    rung: Rung, window: int
) -> None:
    dtype = torch.float32 if rung.takes(torch.float32, 64) else torch.float16
    batch = replace(make_chunks([(70, 18), (95, 1), (36, 36)], 2, 1, 64, 8, dtype), window=window)
    expected = batch.expected()
    for s in range(3):
        batch.block_tables[s, : batch.first_seen(s) // 8] = -1
    assert_attention(batch.run, expected, rung, dtype)


@every_rung("prefill_attention")
def test_a_logit_hundreds_above_the_others_neither_overflows_nor_is_lost(rung: Rung) -> None:
    """It comes first, in the middle, or last: what was summed before it is scaled down to nothing."""
    dtype = torch.float32 if rung.takes(torch.float32, 64) else torch.float16
    batch = make_chunks([(80, 30), (80, 30), (80, 80)], 1, 1, 64, 16, dtype)
    batch = replace(batch, query=batch.query.abs())  # so that one key is far above the others for every row
    for seq, position in ((0, 0), (1, 37), (2, 79)):
        batch.k_cache[batch.block_tables[seq, position // 16].long(), position % 16] = 30.0
    assert_attention(batch.run, batch.expected(), rung, dtype)


@pytest.mark.parametrize("rung", rungs_of("prefill_attention"))
@pytest.mark.parametrize("shape", range(6))
def test_random_ragged_batches_equal_the_oracle(rung: str, shape: int) -> None:
    rng = np.random.default_rng(shape)
    kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    dtype = [torch.float16, torch.float32, torch.bfloat16][shape % 3]
    lengths = rng.integers(1, 80, size=int(rng.integers(1, 5))).tolist()
    chunks = [(length, int(rng.integers(0, min(length, 25) + 1))) for length in lengths]
    head_dim, block_size = int(rng.choice([64, 128, 96])), int(rng.choice([8, 16, 32]))
    batch = make_chunks(chunks, kv_heads * group, kv_heads, head_dim, block_size, dtype, seed=shape)
    seed, threads = ORDERS[shape % len(ORDERS)]
    case = Rung(rung, kernels.ladder("simt", seed=seed + 10, threads=threads))
    assert_attention(batch.run, batch.expected(), case, dtype)


@pytest.mark.parametrize("rung", rungs_of("prefill_attention"))
def test_values_are_the_same_bits_for_every_order_of_threads(rung: str) -> None:
    batch = make_chunks(MIXED, 3, 1, 64, 16, torch.float16)
    outs = [batch.run(kernels.ladder("simt", seed=s, threads=t), rung) for s, t in [(0, 1), (5, 1), (6, 2)]]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_no_rows_at_all_are_no_work() -> None:
    batch = make_chunks([(10, 0), (3, 0)], 2, 1, 64, 16, torch.float32)
    arguments = (batch.k_cache, batch.v_cache, batch.block_tables, batch.query_start_loc, batch.seq_lens)
    kernels.ladder("simt").prefill_attention(batch.query, batch.query, *arguments, batch.scale)
    assert batch.query.shape == (0, 2, 64)


def test_caches_that_start_anywhere_take_the_path_without_vectors() -> None:
    batch = make_chunks([(40, 20)], 2, 1, 64, 16, torch.float32)
    storage = torch.empty(batch.k_cache.numel() + 1)
    shifted = storage[1:].view(batch.k_cache.shape)  # 4 bytes past a multiple of 16
    shifted.copy_(batch.k_cache)
    out = replace(batch, k_cache=shifted).run(kernels.ladder("simt"), "")
    assert_close(out, batch.expected(), ATTENTION[torch.float32])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": ints(0, 9, 12)}, "to start at 0 and end at T=14, got 0 and 12"),
        (
            {"query_start_loc": ints(0, 15, 14), "seq_lens": ints(16, 20)},
            "query_start_loc: expected ascending values, got -1 rows of sequence 1",
        ),
        ({"query_start_loc": ints(0, 14)}, r"query_start_loc: expected shape \[S\+1=3\], got \[2\]"),
        ({"seq_lens": ints(8, 20)}, r"seq_lens: expected between 9 \(the query rows\) and 48"),
        ({"seq_lens": ints(9, 49)}, r"and 48 \(max_blocks \* B\) of sequence 1, got 49"),
        ({"seq_lens": ints(9, 40)}, r"expected blocks in \[0, 5\), got -1 at entry 2 of sequence 1"),
        ({"window": -1}, r"window: expected at least 0 \(off\), got -1"),
        ({"rung": "v9"}, "rung: expected one of v1_naive.*, got v9"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused_and_nothing_is_written(
    changes: dict[str, Any], message: str
) -> None:
    batch = make_chunks([(9, 9), (20, 5)], 2, 1, 64, 16, torch.float32)
    arguments = {name: getattr(batch, name) for name in Chunks.__dataclass_fields__}
    arguments |= {"out": torch.full_like(batch.query, float("nan")), "scale": batch.scale} | changes
    with pytest.raises(ValueError, match=message):
        kernels.ladder("simt").prefill_attention(**arguments)
    assert arguments["out"].isnan().all()
