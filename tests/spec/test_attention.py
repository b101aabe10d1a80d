"""Paged attention: what it computes, which cache entries it may read, and how chunks and heads are placed.

Unless a test says otherwise, every cache slot that no token of the test owns holds NaN: null block, padding, the unused
end of a last block. One read of such a slot, even with weight zero, makes the output NaN and the test fail.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from reference.attention import AttentionMetadata
from reference.contracts.config import cdiv
from reference.naive_attention import naive_paged_attention
from tests.tier_arrays import as_tier_array, assert_close, to_numpy

# Scores are O(1) sums of at most 64 products and the output is a mean of O(1) values, so a few dozen float32 roundings
# of 6e-8 each can meet: well below 1e-5, while one wrong token, block or head shifts the output by 1e-2 or more.
TOLERANCE = 1e-5
HEADS = [(4, 2), (9, 3), (7, 1)]
BLOCK_SIZES = [1, 4, 16]
RAGGED = [
    (0, 1),
    (5, 1),
    (0, 7),
    (16, 16),
    (3, 21),
    (40, 1),
    (15, 2),
]  # (computed, scheduled) tokens a sequence


@dataclass
class Batch:
    """A flat batch whose context is in the cache already; its own K and V are still to be written."""

    query: np.ndarray  # [T, H, D]
    key: np.ndarray  # [T, Hkv, D]
    value: np.ndarray  # [T, Hkv, D]
    k_cache: np.ndarray  # [N, B, Hkv, D]
    v_cache: np.ndarray  # [N, B, Hkv, D]
    metadata: AttentionMetadata

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1]) ** -0.5


def make_batch(
    sequences: Sequence[tuple[int, int]],
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int = 16,
    seed: int = 0,
) -> Batch:
    """Random sequences in shuffled blocks; tables are padded with two entries more than the longest needs."""
    rng = np.random.default_rng(seed)
    tables = [cdiv(computed + scheduled, block_size) for computed, scheduled in sequences]
    free_blocks = (1 + rng.permutation(sum(tables) + 3)).tolist()
    cache_shape = (len(free_blocks) + 1, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (np.full(cache_shape, np.nan, dtype=np.float32) for _ in range(2))

    block_tables = np.zeros((len(sequences), max(tables) + 2), dtype=np.int32)
    query_start_loc, seq_lens, slot_mapping = [0], [], []
    for s, (computed, scheduled) in enumerate(sequences):
        block_tables[s, : tables[s]] = [free_blocks.pop() for _ in range(tables[s])]
        for position in range(computed + scheduled):
            block, offset = block_tables[s, position // block_size], position % block_size
            if position < computed:
                k_cache[block, offset] = rng.normal(size=(num_kv_heads, head_dim))
                v_cache[block, offset] = rng.normal(size=(num_kv_heads, head_dim))
            else:
                slot_mapping.append(block * block_size + offset)
        query_start_loc.append(query_start_loc[-1] + scheduled)
        seq_lens.append(computed + scheduled)

    num_tokens = query_start_loc[-1]
    return Batch(
        query=rng.normal(size=(num_tokens, num_heads, head_dim)).astype(np.float32),
        key=rng.normal(size=(num_tokens, num_kv_heads, head_dim)).astype(np.float32),
        value=rng.normal(size=(num_tokens, num_kv_heads, head_dim)).astype(np.float32),
        k_cache=k_cache,
        v_cache=v_cache,
        metadata=AttentionMetadata(
            query_start_loc=np.array(query_start_loc, dtype=np.int32),
            seq_lens=np.array(seq_lens, dtype=np.int32),
            block_tables=block_tables,
            slot_mapping=np.array(slot_mapping, dtype=np.int64),
        ),
    )


class TierAttention:
    """A tier's attention module, called with NumPy arrays."""

    def __init__(self, tier_name: str) -> None:
        self.tier_name = tier_name
        self.module = importlib.import_module(f"{tier_name}.attention")

    def _convert(self, array: np.ndarray) -> Any:
        return as_tier_array(self.tier_name, array)

    def _metadata(self, metadata: AttentionMetadata) -> Any:
        return self.module.AttentionMetadata(
            query_start_loc=self._convert(metadata.query_start_loc),
            seq_lens=self._convert(metadata.seq_lens),
            block_tables=self._convert(metadata.block_tables),
            slot_mapping=self._convert(metadata.slot_mapping),
        )

    def write(self, batch: Batch) -> Batch:
        """The batch after its own K and V were written into copies of its caches."""
        k_cache, v_cache = self._convert(batch.k_cache), self._convert(batch.v_cache)
        self.module.write_kv_cache(
            self._convert(batch.key),
            self._convert(batch.value),
            k_cache,
            v_cache,
            self._metadata(batch.metadata),
        )
        return Batch(
            batch.query, batch.key, batch.value, to_numpy(k_cache), to_numpy(v_cache), batch.metadata
        )

    def attend(self, batch: Batch, sliding_window: int | None = None) -> np.ndarray:
        """[T, H, D]; the batch's K and V are in its caches."""
        output = self.module.paged_attention(
            self._convert(batch.query),
            self._convert(batch.k_cache),
            self._convert(batch.v_cache),
            self._metadata(batch.metadata),
            batch.scale,
            sliding_window,
        )
        return to_numpy(output)


@pytest.fixture
def attention(tier_name: str) -> TierAttention:
    return TierAttention(tier_name)


def naive(batch: Batch, sliding_window: int | None = None) -> np.ndarray:
    return naive_paged_attention(
        batch.query, batch.k_cache, batch.v_cache, batch.metadata, batch.scale, sliding_window
    )


def test_the_loop_form_equals_softmax_of_scores_times_values_written_as_one_formula() -> None:
    """Anchors the oracle of all other tests to the textbook: one sequence, no blocks, heads repeated in memory."""
    length, num_heads, num_kv_heads, head_dim = 11, 6, 2, 8
    batch = make_batch(
        [(0, length)], block_size=length, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    block = int(batch.metadata.block_tables[0, 0])
    batch.k_cache[block], batch.v_cache[block] = batch.key, batch.value

    query = batch.query.astype(np.float64).swapaxes(0, 1)  # [H, T, D]
    key = batch.key.astype(np.float64).repeat(3, axis=1).swapaxes(0, 1)  # [H, T, D]
    value = batch.value.astype(np.float64).repeat(3, axis=1).swapaxes(0, 1)  # [H, T, D]
    scores = query @ key.swapaxes(1, 2) / np.sqrt(head_dim)  # [H, T, T]
    scores[:, np.triu(np.ones((length, length), dtype=bool), k=1)] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    textbook = (weights @ value).swapaxes(0, 1)  # [T, H, D]

    assert np.abs(naive(batch) - textbook).max() < 1e-12  # both are float64


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_ragged_chunks_and_decodes_in_one_batch_equal_the_loop_form(
    attention: TierAttention, block_size: int, num_heads: int, num_kv_heads: int
) -> None:
    batch = attention.write(make_batch(RAGGED, block_size, num_heads, num_kv_heads))
    assert_close(attention.attend(batch), naive(batch), TOLERANCE)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_every_head_dim_equals_the_loop_form(attention: TierAttention, head_dim: int) -> None:
    batch = attention.write(make_batch([(9, 1), (0, 6), (4, 3)], 4, 4, 2, head_dim=head_dim, seed=1))
    assert_close(attention.attend(batch), naive(batch), TOLERANCE)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_write_goes_to_the_slots_of_the_batch_and_nowhere_else(
    attention: TierAttention, block_size: int
) -> None:
    before = make_batch(RAGGED, block_size, 4, 2)
    after = attention.write(before)
    slots = before.metadata.slot_mapping
    for old, new, rows in (
        (before.k_cache, after.k_cache, before.key),
        (before.v_cache, after.v_cache, before.value),
    ):
        expected = old.copy()
        expected[slots // block_size, slots % block_size] = rows
        assert np.array_equal(new, expected, equal_nan=True)


@pytest.mark.parametrize("chunk_size", [1, 3, 5, 16])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_prefill_in_chunks_equals_the_whole_prefill(
    attention: TierAttention, block_size: int, chunk_size: int
) -> None:
    length = 23
    whole = make_batch([(0, length)], block_size, 9, 3, seed=2)
    expected = attention.attend(attention.write(whole))

    chunked = whole
    outputs = []
    for start in range(0, length, chunk_size):
        end = min(start + chunk_size, length)
        chunk = Batch(
            query=whole.query[start:end],
            key=whole.key[start:end],
            value=whole.value[start:end],
            k_cache=chunked.k_cache,
            v_cache=chunked.v_cache,
            metadata=AttentionMetadata(
                query_start_loc=np.array([0, end - start], dtype=np.int32),
                seq_lens=np.array([end], dtype=np.int32),
                block_tables=whole.metadata.block_tables,
                slot_mapping=whole.metadata.slot_mapping[start:end],
            ),
        )
        chunked = attention.write(chunk)
        outputs.append(attention.attend(chunked))
    assert_close(np.concatenate(outputs), expected, TOLERANCE)


def test_padding_entries_of_a_block_table_are_never_read(attention: TierAttention) -> None:
    batch = attention.write(make_batch(RAGGED, 4, 4, 2))
    expected = attention.attend(batch)
    owned = {int(block) for table in batch.metadata.block_tables for block in table}
    foreign = next(block for block in range(1, len(batch.k_cache)) if block not in owned)
    assert np.isnan(batch.k_cache[foreign]).all()
    for s, seq_len in enumerate(batch.metadata.seq_lens.tolist()):
        batch.metadata.block_tables[s, cdiv(seq_len, 4) :] = foreign
    output = attention.attend(batch)
    assert np.all(np.isfinite(output))
    assert np.array_equal(output, expected)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_b61_query_head_h_reads_kv_head_h_divided_by_the_group_size(
    attention: TierAttention, num_heads: int, num_kv_heads: int
) -> None:
    batch = make_batch([(6, 2), (0, 3)], 4, num_heads, num_kv_heads, seed=3)
    kv_head = np.arange(num_kv_heads, dtype=np.float32)[:, None]  # every value of KV head i is i
    batch.v_cache[:] = np.where(np.isnan(batch.v_cache), np.nan, kv_head)
    batch.value[:] = kv_head
    output = attention.attend(attention.write(batch))  # [T, H, D]
    group = num_heads // num_kv_heads
    expected = np.broadcast_to((np.arange(num_heads) // group)[None, :, None], output.shape)
    # A mean of equal numbers: only the weights' sum, 1 within a few roundings, can move it.
    assert_close(output, expected.astype(np.float64), TOLERANCE)


@pytest.mark.parametrize("computed", [0, 6])
def test_a_token_sees_itself_and_its_past_and_nothing_later(attention: TierAttention, computed: int) -> None:
    scheduled = 5
    batch = make_batch([(computed, scheduled)], 4, 4, 2, seed=4)
    original = attention.attend(attention.write(batch))
    for changed in range(scheduled):
        key, value = batch.key.copy(), batch.value.copy()
        key[changed] += 1.0
        value[changed] += 1.0
        output = attention.attend(
            attention.write(Batch(batch.query, key, value, batch.k_cache, batch.v_cache, batch.metadata))
        )
        moved = np.abs(output - original).max(axis=(1, 2)) > 1e-3  # [Tq]
        assert moved.tolist() == [row >= changed for row in range(scheduled)]


def test_the_first_token_of_a_sequence_attends_to_itself_alone(attention: TierAttention) -> None:
    batch = attention.write(make_batch([(0, 1)], 16, 7, 1))
    assert_close(attention.attend(batch), np.broadcast_to(batch.value, batch.query.shape), TOLERANCE)


def test_scores_far_beyond_the_range_of_exp_do_not_overflow(attention: TierAttention) -> None:
    batch = attention.write(make_batch([(20, 3), (7, 1)], 4, 4, 2, seed=5))
    batch.query *= 3000.0
    output = attention.attend(batch)
    assert np.all(np.isfinite(output))
    # Scores reach 1e4, where float32 numbers are 1e-3 apart: the weights, and so the output, inherit that error.
    assert_close(output, naive(batch), 2e-2)


def test_sequences_that_share_blocks_read_the_same_keys_and_values(attention: TierAttention) -> None:
    batch = attention.write(make_batch([(8, 1), (8, 1)], 4, 4, 2, seed=6))
    tables = batch.metadata.block_tables
    tables[1, :2] = tables[0, :2]  # a common prefix of two full blocks, own blocks after it
    assert_close(attention.attend(batch), naive(batch), TOLERANCE)


def test_nan_in_one_sequence_stays_in_that_sequence(attention: TierAttention) -> None:
    batch = make_batch([(5, 2), (5, 2), (0, 3)], 4, 4, 2, seed=7)
    healthy = attention.attend(attention.write(batch))
    batch.key[2:4] = np.nan  # the rows of the middle sequence
    output = attention.attend(attention.write(batch))
    assert np.isnan(output[2:4]).all()
    assert np.array_equal(output[:2], healthy[:2])
    assert np.array_equal(output[4:], healthy[4:])


WINDOWS = [1, 3, 4, 16, 100]


def test_the_loop_form_with_a_window_equals_softmax_over_a_band_of_the_score_matrix() -> None:
    length, window, head_dim = 11, 3, 8
    batch = make_batch([(0, length)], block_size=length, num_heads=2, num_kv_heads=2, head_dim=head_dim)
    block = int(batch.metadata.block_tables[0, 0])
    batch.k_cache[block], batch.v_cache[block] = batch.key, batch.value

    query, key, value = (
        x.astype(np.float64).swapaxes(0, 1) for x in (batch.query, batch.key, batch.value)
    )  # [H, T, D]
    scores = query @ key.swapaxes(1, 2) / np.sqrt(head_dim)  # [H, T, T]
    ones = np.ones((length, length), dtype=bool)
    band = np.tril(ones) & ~np.tril(ones, k=-window)  # the diagonal and the two below it
    assert band.sum(axis=1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    weights = np.exp(np.where(band, scores, -np.inf))
    textbook = (weights / weights.sum(axis=-1, keepdims=True) @ value).swapaxes(0, 1)  # [T, H, D]

    assert np.abs(naive(batch, window) - textbook).max() < 1e-12  # both are float64


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_b26_with_a_window_nothing_left_of_it_is_read_and_the_rest_equals_the_loop_form(
    attention: TierAttention, block_size: int, window: int
) -> None:
    """Blocks wholly left of the window of the first query are the null block in the table, which holds NaN."""
    batch = attention.write(make_batch(RAGGED, block_size, 9, 3, seed=8))
    expected = naive(batch, window)
    tables = batch.metadata.block_tables
    for s, (computed, _) in enumerate(RAGGED):
        first_seen = max(computed - window + 1, 0)
        for position in range(first_seen):
            where = tables[s, position // block_size], position % block_size
            batch.k_cache[where], batch.v_cache[where] = np.nan, np.nan
        tables[s, : first_seen // block_size] = 0
    assert_close(attention.attend(batch, window), expected, TOLERANCE)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_key_is_seen_by_as_many_tokens_as_the_window_is_long(attention: TierAttention, window: int) -> None:
    scheduled = 12
    batch = make_batch([(0, scheduled)], 4, 4, 2, seed=9)
    original = attention.attend(attention.write(batch), window)
    for changed in range(scheduled):
        value = batch.value.copy()
        value[changed] += 100.0
        output = attention.attend(
            attention.write(
                Batch(batch.query, batch.key, value, batch.k_cache, batch.v_cache, batch.metadata)
            ),
            window,
        )
        moved = np.flatnonzero(np.abs(output - original).max(axis=(1, 2)) > 1e-3)
        assert moved.tolist() == list(range(changed, min(changed + window, scheduled)))
