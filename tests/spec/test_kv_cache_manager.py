"""Prefix cache and block tables, on both tiers. Block size 4 unless said."""

from __future__ import annotations

import pytest

from reference.contracts.block_hash import ROOT_HASH, extra_keys, hash_block
from reference.contracts.config import CacheConfig
from reference.contracts.protocols import KVCacheManager, Tier
from reference.contracts.request import Request
from tests.factories import make_config, make_request


def make_manager(
    tier: Tier, num_usable_blocks: int = 20, *, block_size: int = 4, caching: bool = True
) -> KVCacheManager:
    return tier.make_kv_cache_manager(
        make_config(block_size=block_size, num_usable_blocks=num_usable_blocks, caching=caching)
    )


def admit(manager: KVCacheManager, request: Request) -> int:
    """Allocate the whole request as one step would; returns the number of cached tokens."""
    manager.begin_step()
    hits = manager.get_computed_blocks(request)
    num_cached = len(hits) * manager.block_size  # type: ignore[attr-defined]
    assert manager.allocate_slots(request, request.num_tokens - num_cached, hits) is not None
    request.num_computed_tokens = request.num_tokens
    manager.check_integrity()
    return num_cached


def test_a_full_block_is_named_by_its_whole_prefix_not_by_its_own_tokens() -> None:
    same_tokens = [5, 6, 7, 8]
    first = hash_block(ROOT_HASH, same_tokens)
    assert hash_block(hash_block(ROOT_HASH, [1, 2, 3, 4]), same_tokens) != first
    assert hash_block(ROOT_HASH, same_tokens) == first
    assert len(first) == 32


def test_equal_blocks_behind_different_prefixes_are_not_shared(tier: Tier) -> None:
    manager = make_manager(tier)
    admit(manager, make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert admit(manager, make_request("b", [4, 3, 2, 1, 5, 6, 7, 8, 9])) == 0
    # The first block of c holds the tokens of a's second, but not behind a's first.
    assert admit(manager, make_request("c", [5, 6, 7, 8, 9])) == 0


def test_b05_extra_keys_of_different_kinds_never_collide() -> None:
    tokens = [1, 2, 3, 4]
    salted = hash_block(ROOT_HASH, tokens, [("salt", "x")])
    assert salted != hash_block(ROOT_HASH, tokens, [("adapter", "x")])
    assert salted != hash_block(ROOT_HASH, tokens)
    assert hash_block(ROOT_HASH, tokens, [("salt", "a"), ("adapter", "b")]) != hash_block(
        ROOT_HASH, tokens, [("salt", "ab")]
    )


def test_the_salt_enters_the_first_block_only() -> None:
    assert extra_keys(0, "s") == (("salt", "s"),)
    assert extra_keys(1, "s") == ()
    assert extra_keys(0, None) == ()


def test_b05_the_same_salt_hits_and_another_salt_or_none_misses(tier: Tier) -> None:
    manager = make_manager(tier)
    prompt = list(range(100, 113))
    assert admit(manager, make_request("a", prompt, cache_salt="x")) == 0
    assert admit(manager, make_request("b", prompt, cache_salt="x")) == 12
    assert admit(manager, make_request("c", prompt, cache_salt="y")) == 0
    assert admit(manager, make_request("d", prompt)) == 0


def test_a_miss_takes_blocks_in_free_queue_order(tier: Tier) -> None:
    manager = make_manager(tier)
    admit(manager, make_request("a", 9))
    assert manager.get_block_ids("a") == (1, 2, 3)
    assert manager.snapshot().ref_counts == {1: 1, 2: 1, 3: 1}


def test_a_hit_while_the_owner_runs_shares_its_blocks_and_counts_two_holders(tier: Tier) -> None:
    manager = make_manager(tier)
    admit(manager, make_request("a", list(range(9))))
    assert admit(manager, make_request("b", [*range(8), 77, 78])) == 8
    assert manager.get_block_ids("b") == (1, 2, 4)
    assert manager.snapshot().ref_counts == {1: 2, 2: 2, 3: 1, 4: 1}


def test_blocks_are_freed_tail_first_so_that_shared_heads_are_evicted_last(tier: Tier) -> None:
    manager = make_manager(tier, num_usable_blocks=10)
    a, b = make_request("a", list(range(13))), make_request("b", [*range(8), 50, 51, 52, 53, 54])
    admit(manager, a)
    assert manager.get_block_ids("a") == (1, 2, 3, 4)
    assert admit(manager, b) == 8
    assert manager.get_block_ids("b") == (1, 2, 5, 6)
    manager.free(a)
    # 4 is not full: front. 3 has a hash: back. 1 and 2 are still held by b.
    assert manager.snapshot().free_order == (4, 7, 8, 9, 10, 3)
    manager.free(b)
    assert manager.snapshot().free_order == (6, 4, 7, 8, 9, 10, 3, 5, 2, 1)
    manager.check_integrity()


def test_a_hit_on_freed_blocks_takes_them_out_of_the_queue(tier: Tier) -> None:
    manager = make_manager(tier)
    first = make_request("a", list(range(9)))
    admit(manager, first)
    manager.free(first)
    assert admit(manager, make_request("b", [*range(8), 90])) == 8
    assert manager.get_block_ids("b") == (1, 2, 3)
    assert manager.snapshot().ref_counts == {1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize(("num_tokens", "expected"), [(16, 0), (32, 16), (33, 32), (48, 32)])
def test_b01_a_wholly_cached_prompt_leaves_at_least_one_token_to_compute(
    tier: Tier, num_tokens: int, expected: int
) -> None:
    manager = make_manager(tier, block_size=16)
    admit(manager, make_request("a", list(range(num_tokens))))
    assert admit(manager, make_request("b", list(range(num_tokens)))) == expected


def test_b01_the_hash_chain_stays_whole_for_a_longer_request_after_a_full_hit(tier: Tier) -> None:
    manager = make_manager(tier, block_size=16)
    admit(manager, make_request("a", list(range(32))))
    admit(manager, make_request("b", list(range(32))))
    assert admit(manager, make_request("c", list(range(48)))) == 32


def test_a_recomputed_last_block_duplicates_the_hash_and_both_blocks_serve_it(tier: Tier) -> None:
    manager = make_manager(tier)
    first, second = make_request("a", list(range(8))), make_request("b", list(range(8)))
    admit(manager, first)
    admit(manager, second)  # hits block 1 only; its own second block gets the hash of block 2 again
    hashes = manager.snapshot().hashes
    assert hashes[2] == hashes[3]
    longer = make_request("c", list(range(9)))
    assert manager.get_computed_blocks(longer) == [1, 2]  # the first inserted


def test_generated_tokens_fill_and_register_blocks_too(tier: Tier) -> None:
    manager = make_manager(tier)
    request = make_request("a", list(range(7)))
    admit(manager, request)
    for token in (70, 71, 72):
        request.all_token_ids.append(token)
        manager.begin_step()
        new_blocks = manager.allocate_slots(request, 1)
        assert new_blocks == ([3] if request.num_tokens == 9 else [])
        request.num_computed_tokens += 1
        manager.check_integrity()
    assert admit(manager, make_request("next turn", [*range(7), 70, 71, 72, 80])) == 8


def test_a_prompt_of_two_equal_requests_in_one_step_is_computed_once(tier: Tier) -> None:
    manager = make_manager(tier)
    first, second = make_request("a", list(range(10))), make_request("b", list(range(10)))
    manager.begin_step()
    manager.allocate_slots(first, 10)
    assert manager.get_computed_blocks(second) == [1, 2]


def test_only_blocks_whose_every_token_is_computed_are_registered(tier: Tier) -> None:
    manager = make_manager(tier)
    request = make_request("a", list(range(16)))
    manager.begin_step()
    manager.allocate_slots(request, 6)  # a chunk: block 1 full, block 2 half
    assert set(manager.snapshot().hashes) == {1}
    request.num_computed_tokens = 6
    manager.begin_step()
    manager.allocate_slots(request, 2)
    assert set(manager.snapshot().hashes) == {1, 2}


def test_an_allocation_that_cannot_be_met_changes_nothing(tier: Tier) -> None:
    manager = make_manager(tier, num_usable_blocks=4)
    finished = make_request("old", list(range(9)))
    admit(manager, finished)
    manager.free(finished)
    before = manager.snapshot()
    request = make_request("big", [*range(8), *range(50, 62)])  # 5 blocks, two of them hits
    hits = manager.get_computed_blocks(request)
    assert len(hits) == 2
    assert manager.allocate_slots(request, 12, hits) is None
    assert manager.snapshot() == before
    manager.check_integrity()


def test_a_hit_that_nobody_holds_counts_against_the_free_capacity_once(tier: Tier) -> None:
    manager = make_manager(tier, num_usable_blocks=4)
    finished = make_request("old", list(range(9)))
    admit(manager, finished)
    manager.free(finished)
    fits = make_request("fits", [*range(8), *range(50, 58)])  # 2 hits + 2 fresh = the whole pool
    hits = manager.get_computed_blocks(fits)
    assert manager.allocate_slots(fits, 8, hits) == [1, 2, 3, 4]
    assert manager.snapshot().num_free_blocks == 0
    manager.check_integrity()


def test_hits_are_touched_first_and_so_never_evicted_for_the_same_allocation(tier: Tier) -> None:
    manager = make_manager(tier, num_usable_blocks=4)
    for request in (make_request("old", list(range(8))), make_request("newer", list(range(50, 58)))):
        admit(manager, request)
        manager.free(request)
    assert manager.snapshot().free_order == (2, 1, 4, 3)  # the hit below is what would be evicted next
    request = make_request("hit", [*range(8), *range(60, 68)])
    assert manager.allocate_slots(request, 8, manager.get_computed_blocks(request)) == [1, 2, 4, 3]
    manager.check_integrity()


def test_with_caching_off_nothing_is_hit_or_hashed_and_freed_blocks_return_to_the_front(tier: Tier) -> None:
    manager = make_manager(tier, num_usable_blocks=5, caching=False)
    first, second = make_request("a", list(range(9))), make_request("b", list(range(9)))
    admit(manager, first)
    assert manager.get_computed_blocks(second) == []
    assert manager.allocate_slots(second, 9) is None  # 2 free, 3 needed
    assert manager.snapshot().hashes == {}
    manager.free(first)
    assert manager.snapshot().free_order == (3, 2, 1, 4, 5)


def test_withdraw_takes_back_what_this_step_registered_and_nothing_older(tier: Tier) -> None:
    manager = make_manager(tier)
    request = make_request("a", list(range(16)))
    manager.begin_step()
    manager.allocate_slots(request, 8)
    request.num_computed_tokens = 8
    manager.begin_step()
    manager.allocate_slots(request, 8)
    assert set(manager.snapshot().hashes) == {1, 2, 3, 4}
    manager.withdraw(request)
    assert set(manager.snapshot().hashes) == {1, 2}
    manager.free(request)
    assert manager.snapshot().free_order[:2] == (4, 3)  # without a hash they are the first to be reused
    manager.check_integrity()


def test_withdraw_whole_keeps_the_blocks_that_were_hits(tier: Tier) -> None:
    manager = make_manager(tier)
    admit(manager, make_request("healthy", list(range(9))))
    broken = make_request("broken", [*range(8), *range(60, 68), 70])
    admit(manager, broken)
    assert len(manager.snapshot().hashes) == 4
    manager.withdraw(broken, whole=True)
    assert set(manager.snapshot().hashes) == {1, 2}


def test_reset_forgets_everything_only_when_idle(tier: Tier) -> None:
    manager = make_manager(tier)
    request = make_request("a", list(range(9)))
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request("b", list(range(9)))) == []


@pytest.mark.parametrize(("block_size", "num_blocks"), [(0, 10), (16, 1)])
def test_an_impossible_cache_is_refused(block_size: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        CacheConfig(block_size, num_blocks)
