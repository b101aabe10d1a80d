"""reshape_and_cache."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fast import kernels


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_token_lands_in_its_slot_and_nothing_else_is_touched(
    block_size: int, threads: int, use_threads: Callable[[int], None]
) -> None:
    use_threads(threads)
    num_tokens, num_slots = 400, 640
    key, value = random(num_tokens, 3, 64, seed=0), random(num_tokens, 3, 64, seed=1)
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(2))[:num_tokens]
    k_cache, v_cache = (torch.full((num_slots // block_size, block_size, 3, 64), 7.0) for _ in range(2))
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for t, slot in enumerate(slots.tolist()):
        expected_k[slot // block_size, slot % block_size] = key[t]
        expected_v[slot // block_size, slot % block_size] = value[t]
    kernels.reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_key_and_value_may_be_slices_of_a_fused_projection() -> None:
    qkv = random(5, (9 + 3 + 3) * 64, seed=0)
    key, value = qkv[:, 576:768].view(5, 3, 64), qkv[:, 768:].view(5, 3, 64)
    k_cache, v_cache = torch.zeros(2, 4, 3, 64), torch.zeros(2, 4, 3, 64)
    slots = torch.tensor([7, 0, 3, 4, 1])
    kernels.reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert torch.equal(k_cache.view(8, 3, 64)[slots], key)
    assert torch.equal(v_cache.view(8, 3, 64)[slots], value)


@pytest.mark.parametrize("slot", [-1, 8, 2**40])
def test_a_slot_out_of_range_is_refused_and_nothing_is_written(slot: int) -> None:
    key = torch.ones(2, 3, 64)
    k_cache, v_cache = torch.zeros(2, 4, 3, 64), torch.zeros(2, 4, 3, 64)
    with pytest.raises(
        ValueError, match=rf"slot_mapping: expected values in \[0, 8\).*got {slot} at index 1"
    ):
        kernels.reshape_and_cache(key, key, k_cache, v_cache, torch.tensor([0, slot]))
    assert not k_cache.any()
    assert not v_cache.any()


def flags_of_the_pages_at(address: int) -> set[str]:
    """What the system was asked for these pages (proc(5), VmFlags)."""
    found = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(each, 16) for each in head.split("-"))
            found = begin <= address < end
        elif found and head == "VmFlags:":
            return set(line.split()[1:])
    return set()


def test_a_cache_begins_as_zeros_in_large_pages() -> None:
    cache = kernels.empty_cache(300, 16, 3, 64)
    assert cache.shape == (300, 16, 3, 64)
    assert cache.dtype == torch.float32
    assert not cache.any()
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert cache.data_ptr() % (2 << 20) == 0
        assert "hg" in flags_of_the_pages_at(cache.data_ptr())


def test_a_system_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, option: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(kernels.mmap, "mmap", type("Mmap", (mmap.mmap,), {"madvise": refuse}))
    cache = kernels.empty_cache(3, 4, 1, 8)
    cache += 1.0
    assert cache.sum() == 96


def test_a_cache_that_no_machine_can_hold_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="Unable to allocate"):
        kernels.empty_cache(1 << 40, 16, 3, 64)
