"""cache_write, copy_blocks and swap_blocks, rung by rung, under the emulator: bits are moved, none is changed."""

from __future__ import annotations

import pytest
import torch

from fast import kernels
from tests.kernels.ladders import Rung, every_dtype, every_rung, poisoned, random

# (Hkv, D), whole numbers of 16 bytes in every type; the last two only suit the rungs that move single numbers.
HEADS = [(3, 64), (1, 8), (2, 40), (1, 5), (3, 7)]


def head_shapes(rung: Rung) -> list[tuple[int, int]]:
    return HEADS[:3] if "vectorised" in rung.name else HEADS


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@every_rung("cache_write")
@every_dtype
def test_each_token_lands_in_its_slot_and_no_other_slot_changes(rung: Rung, dtype: torch.dtype) -> None:
    for kv_heads, head_dim in head_shapes(rung):
        qkv = random(9, 4 * kv_heads, head_dim, dtype=dtype, seed=head_dim)
        key, value = qkv[:, kv_heads : 2 * kv_heads], qkv[:, 2 * kv_heads : 3 * kv_heads]
        k_cache, v_cache = (poisoned(4, 16, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        slots = torch.randperm(64, generator=torch.Generator().manual_seed(head_dim))[:9]
        expected_k, expected_v = k_cache.clone(), v_cache.clone()
        expected_k.view(64, kv_heads, head_dim)[slots] = key
        expected_v.view(64, kv_heads, head_dim)[slots] = value
        rung.ladder.reshape_and_cache(key, value, k_cache, v_cache, slots, rung.name)
        assert torch.equal(bits(k_cache), bits(expected_k))
        assert torch.equal(bits(v_cache), bits(expected_v))


@every_rung("cache_write")
def test_a_token_without_a_slot_is_written_nowhere(rung: Rung) -> None:
    rows = random(3, 1, 8, dtype=torch.float32, seed=0)
    cache = poisoned(2, 2, 1, 8, dtype=torch.float32)
    rung.ladder.reshape_and_cache(rows, rows, cache, cache.clone(), torch.tensor([-1, 2, -1]), rung.name)
    assert torch.equal(cache[1, 0], rows[1])
    assert cache.isnan().sum() == 3 * 8


@every_rung("copy_blocks")
@every_dtype
def test_each_target_becomes_its_source_and_no_other_block_changes(rung: Rung, dtype: torch.dtype) -> None:
    for kv_heads, head_dim in head_shapes(rung):
        k_cache, v_cache = (random(7, 16, kv_heads, head_dim, dtype=dtype, seed=s) for s in range(2))
        pairs = torch.tensor([[1, 5], [1, 2], [6, 0]])
        expected_k, expected_v = k_cache.clone(), v_cache.clone()
        expected_k[pairs[:, 1]], expected_v[pairs[:, 1]] = k_cache[pairs[:, 0]], v_cache[pairs[:, 0]]
        rung.ladder.copy_blocks(k_cache, v_cache, pairs, rung.name)
        assert torch.equal(bits(k_cache), bits(expected_k))
        assert torch.equal(bits(v_cache), bits(expected_v))


@every_rung("swap_blocks")
@every_dtype
def test_blocks_move_between_caches_of_different_sizes(rung: Rung, dtype: torch.dtype) -> None:
    for kv_heads, head_dim in head_shapes(rung):
        source, target = (
            random(blocks, 16, kv_heads, head_dim, dtype=dtype, seed=blocks) for blocks in (3, 7)
        )
        pairs = torch.tensor([[2, 5], [0, 6], [2, 0]])
        expected = target.clone()
        expected[pairs[:, 1]] = source[pairs[:, 0]]
        rung.ladder.swap_blocks(source, target, pairs, rung.name)
        assert torch.equal(bits(target), bits(expected))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 1], [1, 1]], "block_mapping: expected different target blocks, got 1 again in pair 1"),
        ([[2, 0]], r"block_mapping: expected values in \[0, 2\) \(blocks of the source\), got 2"),
        ([[0, 4]], r"block_mapping: expected values in \[0, 4\) \(blocks of the target\), got 4"),
    ],
)
def test_a_swap_of_blocks_that_do_not_exist_or_meet_is_refused_and_nothing_is_written(
    pairs: list[list[int]], message: str
) -> None:
    source, target = torch.zeros(2, 4, 1, 8), poisoned(4, 4, 1, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        kernels.ladder("simt").swap_blocks(source, target, torch.tensor(pairs))
    with pytest.raises(ValueError, match="target: expected other memory than the source's"):
        kernels.ladder("simt").swap_blocks(target, target, torch.tensor([[0, 1]]))
    assert target.isnan().all()


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 1], [2, 1]], "block_mapping: expected different target blocks, got 1 again in pair 1"),
        (
            [[0, 1], [1, 2]],
            "block_mapping: expected target blocks that no pair copies from, got 1 in pair 0",
        ),
        ([[0, 3]], r"block_mapping: expected values in \[0, 3\) \(N blocks\), got 3 at index 1"),
        ([[-1, 1]], r"block_mapping: expected values in \[0, 3\)"),
    ],
)
def test_pairs_that_depend_on_each_others_order_are_refused_and_nothing_is_written(
    pairs: list[list[int]], message: str
) -> None:
    cache = random(3, 4, 1, 8, dtype=torch.float32, seed=0)
    before = cache.clone()
    with pytest.raises(ValueError, match=message):
        kernels.ladder("simt").copy_blocks(cache, cache.clone(), torch.tensor(pairs))
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 12], r"slot_mapping: expected values in \[-1, 12\) \(N \* B slots, or -1\), got 12 at index 1"),
        ([-2, 3], r"slot_mapping: expected values in \[-1, 12\)"),
        ([7, 7], "slot_mapping: expected distinct values, got 7 again at index 1"),
    ],
)
def test_slots_that_do_not_exist_or_meet_are_refused_and_nothing_is_written(
    slots: list[int], message: str
) -> None:
    cache = poisoned(3, 4, 1, 8, dtype=torch.float32)
    rows = random(2, 1, 8, dtype=torch.float32, seed=0)
    with pytest.raises(ValueError, match=message):
        kernels.ladder("simt").reshape_and_cache(rows, rows, cache, cache.clone(), torch.tensor(slots))
    assert cache.isnan().all()
