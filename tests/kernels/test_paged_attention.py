"""paged_attention: values against the oracle, and equal bits however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from fast import kernels
from tests.kernels import oracles
from tests.kernels.oracles import ATTENTION_TOLERANCE, assert_close

# (context computed before this step, query rows): decodes, whole prompts, chunks; lengths at and around the
# kernel's tile of 64 tokens; a sequence of one token.
RAGGED = [(0, 1), (0, 13), (36, 1), (63, 1), (64, 1), (50, 30), (127, 2), (190, 5), (0, 70)]


@dataclass(frozen=True)
class Batch:
    """Arguments of one call. Blocks are scattered, and every slot not owned by a token holds NaN."""

    query: torch.Tensor  # [T, H, D]
    k_cache: torch.Tensor  # [N, B, Hkv, D]
    v_cache: torch.Tensor  # [N, B, Hkv, D]
    block_tables: torch.Tensor  # [S, max_blocks]
    query_start_loc: torch.Tensor  # [S + 1]
    seq_lens: torch.Tensor  # [S]
    sliding_window: int | None = None

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1]) ** -0.5

    def run(self) -> torch.Tensor:
        out = torch.full_like(self.query, float("nan"))
        kernels.paged_attention(
            out,
            self.query,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
            self.scale,
            self.sliding_window,
        )
        return out

    def rows(self, seq: int, first: int, count: int) -> Batch:
        """The same for `count` rows of one sequence only, as if the later ones did not exist yet."""
        begin, end = self.query_start_loc[seq : seq + 2].tolist()
        later = end - begin - first - count
        return replace(
            self,
            query=self.query[begin + first : begin + first + count],
            block_tables=self.block_tables[seq : seq + 1],
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=self.seq_lens[seq : seq + 1] - later,
        )


def make_batch(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int, seed: int = 0
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [computed + rows for computed, rows in lengths]
    needed = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(needed) + 3
    shuffled = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    tables = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)  # -1 must not be read
    k_cache, v_cache = (
        torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan")) for _ in range(2)
    )
    used = 0
    for s, count in enumerate(needed):
        tables[s, :count] = shuffled[used : used + count]
        used += count
        for position in range(seq_lens[s]):
            block, offset = tables[s, position // block_size], position % block_size
            k_cache[block, offset] = torch.randn(kv_heads, head_dim, generator=generator)
            v_cache[block, offset] = torch.randn(kv_heads, head_dim, generator=generator)
    rows = torch.tensor([0] + [count for _, count in lengths]).cumsum(0).to(torch.int32)
    query = torch.randn(int(rows[-1]), heads, head_dim, generator=generator)
    return Batch(query, k_cache, v_cache, tables, rows, torch.tensor(seq_lens, dtype=torch.int32))


def expected(batch: Batch) -> oracles.Floats:
    return oracles.paged_attention(
        batch.query.double().numpy(),
        batch.k_cache.double().numpy(),
        batch.v_cache.double().numpy(),
        batch.block_tables.numpy(),
        batch.query_start_loc.numpy(),
        batch.seq_lens.numpy(),
        batch.scale,
        batch.sliding_window,
    )


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        (4, 2, 64),
        (9, 3, 64),
        (7, 1, 64),
        (4, 2, 128),
        (7, 1, 32),
        (4, 2, 80),
        (3, 3, 33),
        (2, 1, 5),
        (40, 1, 16),
    ],
)
def test_a_ragged_batch_equals_the_oracle(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    batch = make_batch(RAGGED, heads, kv_heads, head_dim, block_size)
    assert_close(batch.run(), expected(batch), ATTENTION_TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_context_equals_the_oracle(seed: int) -> None:
    batch = make_batch([(1500, 1), (700, 3)], 9, 3, 64, 16, seed)
    assert_close(batch.run(), expected(batch), ATTENTION_TOLERANCE)


def test_scores_far_apart_neither_overflow_nor_lose_the_largest() -> None:
    batch = make_batch(RAGGED, 4, 2, 64, 16)
    batch = replace(batch, query=batch.query * 100)
    assert_close(
        batch.run(), expected(batch), 1e-4
    )  # scores of several hundred carry float32 errors of 1e-5 each


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 64), (4, 2, 128), (4, 2, 80)])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_with_any_threads(
    heads: int, kv_heads: int, head_dim: int, threads: int, use_threads: Callable[[int], None]
) -> None:
    batch = make_batch(RAGGED, heads, kv_heads, head_dim, 16)
    use_threads(threads)
    whole = batch.run()
    use_threads(1)
    for s, (_, count) in enumerate(RAGGED):
        begin = int(batch.query_start_loc[s])
        for row in range(count):
            assert torch.equal(batch.rows(s, row, 1).run()[0], whole[begin + row]), f"sequence {s}, row {row}"


@pytest.mark.parametrize("chunk", [2, 3, 7, 11, 64])
def test_a_prompt_has_the_same_bits_in_any_chunks(chunk: int) -> None:
    batch = make_batch([(0, 150)], 9, 3, 64, 16)
    chunks = [batch.rows(0, first, min(chunk, 150 - first)).run() for first in range(0, 150, chunk)]
    assert torch.equal(torch.cat(chunks), batch.run())


@pytest.mark.parametrize("block_size", [1, 4])
def test_the_block_size_does_not_change_a_bit(block_size: int) -> None:
    batch, other = (make_batch(RAGGED, 9, 3, 64, size) for size in (16, block_size))
    k_cache, v_cache = other.k_cache, other.v_cache
    for s, length in enumerate(batch.seq_lens.tolist()):
        for position in range(length):
            target = other.block_tables[s, position // block_size], position % block_size
            source = batch.block_tables[s, position // 16], position % 16
            k_cache[target], v_cache[target] = batch.k_cache[source], batch.v_cache[source]
    assert torch.equal(replace(other, query=batch.query).run(), batch.run())


def test_a_later_token_with_nan_leaves_earlier_rows_untouched() -> None:
    batch = make_batch([(0, 70)], 9, 3, 64, 16)
    clean = batch.run()
    last = batch.block_tables[0, 69 // 16], 69 % 16
    batch.k_cache[last], batch.v_cache[last] = float("nan"), float("nan")
    spoilt = batch.run()
    assert torch.equal(spoilt[:69], clean[:69])
    assert spoilt[69].isnan().all()


def test_query_and_output_may_be_slices_of_wider_rows() -> None:
    batch = make_batch(RAGGED, 9, 3, 64, 16)
    num_tokens = batch.query.shape[0]
    qkv, wide = torch.zeros(num_tokens, 15 * 64), torch.zeros(num_tokens, 10 * 64)
    qkv[:, : 9 * 64] = batch.query.view(num_tokens, -1)
    strided = replace(batch, query=qkv[:, : 9 * 64].view(num_tokens, 9, 64))
    assert torch.equal(strided.run(), batch.run())
    kernels.paged_attention(
        wide[:, 64:].view(num_tokens, 9, 64),
        strided.query,
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        batch.query_start_loc,
        batch.seq_lens,
        batch.scale,
    )
    assert torch.equal(wide[:, 64:].reshape(num_tokens, 9, 64), batch.run())
    assert not wide[:, :64].any()


def test_block_tables_may_be_a_corner_of_a_larger_table() -> None:
    batch = make_batch(RAGGED, 4, 2, 64, 4)
    num_seqs, max_blocks = batch.block_tables.shape
    large = torch.full((num_seqs + 2, max_blocks + 9), -1, dtype=torch.int32)
    large[:num_seqs, :max_blocks] = batch.block_tables
    assert torch.equal(replace(batch, block_tables=large[:num_seqs, :max_blocks]).run(), batch.run())


def test_a_sequence_without_query_rows_is_skipped() -> None:
    batch = make_batch([(5, 2), (9, 0), (0, 3)], 4, 2, 64, 4)
    without = make_batch([(5, 2), (0, 3)], 4, 2, 64, 4)
    tables = torch.stack([batch.block_tables[0], batch.block_tables[2]])
    without = replace(
        batch, block_tables=tables, query_start_loc=without.query_start_loc, seq_lens=without.seq_lens
    )
    assert torch.equal(batch.run(), without.run())


def test_an_empty_batch_is_no_work() -> None:
    batch = make_batch([(5, 2)], 4, 2, 64, 4)
    empty = replace(
        batch,
        query=batch.query[:0],
        block_tables=batch.block_tables[:0],
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=batch.seq_lens[:0],
    )
    assert empty.run().shape == (0, 4, 64)


# Windows around the kernel's tile of 64 tokens and around a block; of one token; longer than every sequence.
WINDOWS = [1, 2, 7, 16, 63, 64, 65, 100, 10_000]
WINDOWED = [*RAGGED, (500, 1), (300, 40), (129, 3), (0, 200)]


NOWHERE = 2**31 - 1  # a block so far behind every cache that reading it ends the process


def spoil_left_of_windows(batch: Batch, window: int) -> Batch:
    """NaN in every slot that no query row sees; the table entry of a block of such slots alone is NOWHERE."""
    k_cache, v_cache = batch.k_cache.clone(), batch.v_cache.clone()
    tables, block_size = batch.block_tables.clone(), batch.k_cache.shape[1]
    counts = batch.query_start_loc.diff().tolist()
    for s, length in enumerate(batch.seq_lens.tolist()):
        first_seen = max(length - counts[s] - window + 1, 0)
        for position in range(first_seen):
            where = batch.block_tables[s, position // block_size], position % block_size
            k_cache[where], v_cache[where] = float("nan"), float("nan")
        tables[s, : first_seen // block_size] = NOWHERE
    return replace(batch, k_cache=k_cache, v_cache=v_cache, block_tables=tables, sliding_window=window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (7, 1, 64, 1), (4, 2, 128, 4), (3, 3, 33, 16), (2, 1, 5, 4), (40, 1, 16, 16)],
)
def test_a_window_equals_the_oracle_and_nothing_left_of_it_is_read(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int
) -> None:
    batch = make_batch(WINDOWED, heads, kv_heads, head_dim, block_size)
    wanted = expected(replace(batch, sliding_window=window))
    assert_close(spoil_left_of_windows(batch, window).run(), wanted, ATTENTION_TOLERANCE)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 33)])
def test_a_row_with_a_window_has_the_same_bits_alone_and_in_any_batch(
    heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
    batch = spoil_left_of_windows(make_batch(WINDOWED, heads, kv_heads, head_dim, 16), window)
    whole = batch.run()
    for s, (_, count) in enumerate(WINDOWED):
        begin = int(batch.query_start_loc[s])
        for row in range(count):
            assert torch.equal(batch.rows(s, row, 1).run()[0], whole[begin + row]), f"sequence {s}, row {row}"


def test_a_window_as_long_as_the_context_changes_no_bit() -> None:
    batch = make_batch(WINDOWED, 9, 3, 64, 16)
    assert torch.equal(replace(batch, sliding_window=501).run(), batch.run())


# Contexts of several of the kernel's parts of 256 tokens, which threads share when there are few sequences.
LONG = [(1100, 1), (511, 1), (512, 1), (505, 20), (1530, 9)]


@pytest.mark.parametrize("window", [None, 1, 300, 512, 513, 1100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 33), (2, 1, 128)])
def test_a_long_context_has_the_same_bits_alone_in_parts_and_in_any_batch(
    heads: int, kv_heads: int, head_dim: int, window: int | None, use_threads: Callable[[int], None]
) -> None:
    batch = replace(make_batch(LONG, heads, kv_heads, head_dim, 16), sliding_window=window)
    wanted = expected(batch)
    if window is not None:
        batch = spoil_left_of_windows(batch, window)
    use_threads(1)
    whole = batch.run()
    assert_close(whole, wanted, ATTENTION_TOLERANCE)
    for threads in (1, 2, 4):
        use_threads(threads)
        assert torch.equal(batch.run(), whole), threads
        for s, (_, count) in enumerate(LONG):
            begin = int(batch.query_start_loc[s])
            for row in {0, count // 2, count - 1}:
                assert torch.equal(batch.rows(s, row, 1).run()[0], whole[begin + row]), (threads, s, row)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_in_which_a_token_would_not_see_itself_is_refused(window: int) -> None:
    batch = replace(make_batch([(5, 2)], 4, 2, 64, 4), sliding_window=window)
    with pytest.raises(ValueError, match=f"sliding_window: expected at least 1 .*, or None, got {window}"):
        batch.run()


def test_blocks_that_a_window_reaches_are_still_checked() -> None:
    batch = make_batch([(7, 2)], 4, 2, 64, 4)  # rows at 7 and 8: with a window of 4 the first sees 4 to 7
    tables = batch.block_tables.clone()
    tables[0, 0] = 99
    replace(batch, block_tables=tables, sliding_window=4).run()
    with pytest.raises(ValueError, match="block_tables: .* got 99 at entry 0 of sequence 0"):
        replace(batch, block_tables=tables, sliding_window=5).run()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_tables": ints(0, 9, 1).view(1, 3)},
            r"block_tables: expected blocks in \[0, 6\), got 9 at entry 1",
        ),
        ({"block_tables": ints(0, 1, -1).view(1, 3)}, r"block_tables: .* got -1 at entry 2 of sequence 0"),
        ({"seq_lens": ints(13)}, r"seq_lens: expected between 2 .* and 12 \(max_blocks \* B\) .* got 13"),
        ({"seq_lens": ints(1)}, r"seq_lens: expected between 2 \(the query rows\) .* got 1"),
        (
            {"query_start_loc": ints(0, 3)},
            r"query_start_loc: expected to start at 0 and end at T=2, got 0 and 3",
        ),
        ({"query_start_loc": ints(1, 2)}, r"query_start_loc: expected to start at 0"),
        ({"query_start_loc": ints(0, 1, 2)}, r"query_start_loc: expected shape \[S\+1=2\], got \[3\]"),
        ({"query": torch.zeros(2, 5, 64)}, r"query: expected a multiple of Hkv=2 heads, got 5"),
        ({"query": torch.zeros(2, 4, 32)}, r"k_cache: expected shape .*D=32\], got \[6, 4, 2, 64\]"),
        ({"v_cache": torch.zeros(6, 4, 1, 64)}, r"v_cache: expected shape \[N=6, B=4, Hkv=2, D=64\], got"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    batch = make_batch([(7, 2)], 4, 2, 64, 4)
    batch = replace(batch, block_tables=batch.block_tables[:, :3].contiguous())
    with pytest.raises(ValueError, match=message):
        replace(batch, **changes).run()


def test_query_start_loc_must_ascend() -> None:
    batch = make_batch([(7, 2), (3, 1)], 4, 2, 64, 4)
    with pytest.raises(
        ValueError, match="query_start_loc: expected ascending values, got -1 rows of sequence 1"
    ):
        replace(batch, query_start_loc=ints(0, 4, 3)).run()


@pytest.mark.parametrize("sliding_window", [None, 2**63 - 1])
@pytest.mark.parametrize("rows", [2, 3, 4, 8, 20, 64])
@pytest.mark.parametrize("seq_len", [65, 66, 67, 129, 130])
def test_the_last_rows_see_a_tile_that_the_rows_computed_with_them_do_not_reach(
    seq_len: int, rows: int, sliding_window: int | None
) -> None:
    batch = replace(make_batch([(seq_len - rows, rows)], 2, 2, 16, 8), sliding_window=sliding_window)
    together = batch.run()
    alone = torch.cat([batch.rows(0, row, 1).run() for row in range(rows)])
    assert torch.equal(together, alone)
