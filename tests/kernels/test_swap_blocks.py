"""swap_blocks and copy_blocks on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fast import kernels


def cache(num_blocks: int, seed: int) -> torch.Tensor:
    return torch.randn(num_blocks, 16, 3, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("threads", [1, 3])
def test_every_block_arrives_at_its_target_and_nothing_else_is_touched(
    threads: int, use_threads: Callable[[int], None]
) -> None:
    use_threads(threads)
    source, target = cache(90, 0), cache(120, 1)
    shuffled = torch.randperm(120, generator=torch.Generator().manual_seed(2))[:70]
    pairs = torch.stack(
        [torch.randint(0, 90, (70,), generator=torch.Generator().manual_seed(3)), shuffled], 1
    )
    expected = target.clone()
    for origin, place in pairs.tolist():
        expected[place] = source[origin]
    kernels.swap_blocks(source, target, pairs)
    assert torch.equal(target, expected)


def test_blocks_are_copied_within_keys_and_values_alike() -> None:
    k_cache, v_cache = cache(6, 0), cache(6, 1)
    expected = [each[[0, 1, 2, 0, 5, 5]] for each in (k_cache, v_cache)]
    kernels.copy_blocks(k_cache, v_cache, torch.tensor([[0, 3], [5, 4], [2, 2]]))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ([4, 0], r"block_mapping: expected blocks in \[0, 4\), got 4 in pair 1"),
        ([0, 6], r"block_mapping: expected blocks in \[0, 6\), got 6 in pair 1"),
        ([-1, 0], r"block_mapping: expected blocks in \[0, 4\), got -1 in pair 1"),
    ],
)
def test_a_block_outside_its_cache_is_refused_before_anything_is_written(
    pair: list[int], message: str
) -> None:
    source, target = cache(4, 0), cache(6, 1)
    before = target.clone()
    with pytest.raises(ValueError, match=message):
        kernels.swap_blocks(source, target, torch.tensor([[1, 1], pair]))
    assert torch.equal(target, before)


def test_caches_of_other_blocks_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"target: expected shape .*B=16, Hkv=3, D=64\], got \[4, 8, 3, 64\]"
    ):
        kernels.swap_blocks(cache(4, 0), torch.zeros(4, 8, 3, 64), torch.tensor([[0, 0]]))
