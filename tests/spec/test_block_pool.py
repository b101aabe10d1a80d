"""The free queue is the eviction policy: exact orders, on both tiers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def make_pool(tier_name: str, num_usable_blocks: int) -> Any:
    return importlib.import_module(f"{tier_name}.block_pool").BlockPool(num_usable_blocks + 1)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_blocks_are_first_handed_out_in_ascending_order_and_never_the_null_block(tier_name: str) -> None:
    pool = make_pool(tier_name, 5)
    assert pool.get_new_blocks(3) == [1, 2, 3]
    assert pool.get_new_blocks(2) == [4, 5]
    assert pool.get_num_free_blocks() == 0
    pool.check_integrity()


def test_taking_more_blocks_than_are_free_is_a_programming_error(tier_name: str) -> None:
    pool = make_pool(tier_name, 2)
    with pytest.raises(AssertionError):
        pool.get_new_blocks(3)


def test_freed_blocks_without_hash_go_to_the_front_as_one_batch_in_the_given_order(tier_name: str) -> None:
    pool = make_pool(tier_name, 6)
    table = pool.get_new_blocks(3)
    pool.free_blocks(table[::-1])
    assert pool.get_free_order() == [3, 2, 1, 4, 5, 6]
    pool.check_integrity()


def test_freed_blocks_with_hash_go_to_the_back_so_that_the_oldest_is_evicted_first(tier_name: str) -> None:
    pool = make_pool(tier_name, 6)
    table = pool.get_new_blocks(4)
    for block in table[:3]:
        pool.cache_block(block, key(block))
    pool.free_blocks(table[::-1])
    assert pool.get_free_order() == [
        4,
        5,
        6,
        3,
        2,
        1,
    ]  # tail 4 has no hash; the shared head 1 is evicted last
    pool.check_integrity()


def test_a_block_stays_held_until_its_last_holder_frees_it(tier_name: str) -> None:
    pool = make_pool(tier_name, 3)
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    pool.free_blocks([block])
    assert pool.get_free_order() == [2, 3]
    pool.free_blocks([block])
    assert pool.get_free_order() == [1, 2, 3]
    with pytest.raises(AssertionError):
        pool.free_blocks([block])


def test_a_hit_on_a_free_block_takes_it_out_of_the_middle_of_the_queue_with_its_hash(tier_name: str) -> None:
    pool = make_pool(tier_name, 4)
    table = pool.get_new_blocks(3)
    for block in table:
        pool.cache_block(block, key(block))
    pool.free_blocks(table[::-1])
    assert pool.get_free_order() == [4, 3, 2, 1]
    pool.touch([2])
    assert pool.get_free_order() == [4, 3, 1]
    assert pool.get_cached_block(key(2)) == 2
    pool.check_integrity()


def test_handing_a_block_out_again_is_eviction_and_forgets_its_hash(tier_name: str) -> None:
    pool = make_pool(tier_name, 1)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, key(7))
    pool.free_blocks([block])
    assert pool.get_cached_block(key(7)) == block
    assert pool.get_new_blocks(1) == [block]
    assert pool.get_cached_block(key(7)) is None
    pool.check_integrity()


def test_one_hash_may_live_on_several_blocks_and_lookup_returns_the_first_inserted(tier_name: str) -> None:
    pool = make_pool(tier_name, 3)
    a, b, c = pool.get_new_blocks(3)
    for block in (b, a, c):
        pool.cache_block(block, key(9))
        pool.check_integrity()
    assert pool.get_cached_block(key(9)) == b
    pool.uncache_block(b)
    assert pool.get_cached_block(key(9)) == a
    pool.uncache_block(b)  # it has no hash any more: nothing happens
    pool.check_integrity()
    pool.uncache_block(a)
    pool.uncache_block(c)
    assert pool.get_cached_block(key(9)) is None
    pool.check_integrity()


def test_reset_is_refused_while_a_block_is_held_and_forgets_every_hash_when_idle(tier_name: str) -> None:
    pool = make_pool(tier_name, 3)
    table = pool.get_new_blocks(2)
    pool.cache_block(table[0], key(1))
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(key(1)) == table[0]
    pool.free_blocks(table[::-1])
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(key(1)) is None
    pool.check_integrity()


def test_integrity_check_notices_a_block_that_is_lost(tier_name: str) -> None:
    pool = make_pool(tier_name, 3)
    pool.get_new_blocks(1)
    pool.ref_count[1] = 0  # neither held nor free now
    with pytest.raises(AssertionError):
        pool.check_integrity()
