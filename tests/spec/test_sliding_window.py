"""Sliding windows in the cache manager and the scheduler, on both tiers: what is freed, in which order, what is hit.

With a window of W tokens the token at position p sees the positions (p - W, p]. Entry i of a table holds the positions
[i * B, (i + 1) * B), so it is dead once (i + 1) * B <= p - W + 1, where p is the next position to compute.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from reference.contracts.config import CacheConfig, EngineConfig, cdiv
from reference.contracts.protocols import KVCacheManager, Tier
from reference.contracts.request import Request
from reference.contracts.schedule import BlockCopy
from tests.factories import Driver, make_config, make_request, scripted_token


def windowed(config: EngineConfig, window: int | None) -> EngineConfig:
    return replace(config, cache=replace(config.cache, sliding_window=window))


def make_manager(
    tier: Tier, window: int | None, num_usable_blocks: int = 20, *, block_size: int = 4, caching: bool = True
) -> KVCacheManager:
    config = make_config(block_size=block_size, num_usable_blocks=num_usable_blocks, caching=caching)
    return tier.make_kv_cache_manager(windowed(config, window))


def compute(manager: KVCacheManager, request: Request, num_tokens: int) -> list[int] | None:
    """One step in which nobody else does anything."""
    manager.begin_step()
    return compute_in_step(manager, request, num_tokens)


def compute_in_step(manager: KVCacheManager, request: Request, num_tokens: int) -> list[int] | None:
    new_blocks = manager.allocate_slots(request, num_tokens)
    if new_blocks is not None:
        request.num_computed_tokens += num_tokens
    manager.check_integrity()
    return new_blocks


def decode(manager: KVCacheManager, request: Request, num_tokens: int, first_token: int = 500) -> None:
    for token in range(first_token, first_token + num_tokens):
        request.all_token_ids.append(token)
        assert compute(manager, request, 1) is not None


def admit(manager: KVCacheManager, request: Request) -> list[int]:
    """Allocate all known tokens behind the hits; returns the hits."""
    manager.begin_step()
    hits = manager.get_computed_blocks(request)
    num_cached = len(hits) * manager.block_size  # type: ignore[attr-defined]
    assert manager.allocate_slots(request, request.num_tokens - num_cached, hits) is not None
    request.num_computed_tokens = request.num_tokens
    manager.check_integrity()
    return hits


# Freeing


def test_b26_an_entry_left_of_the_next_tokens_window_becomes_null_and_its_block_is_freed(tier: Tier) -> None:
    """W = 6, B = 4. The next position is 9: it sees 4 to 9, so block 0 (positions 0 to 3) is dead; at 8 it saw 3."""
    manager = make_manager(tier, 6, num_usable_blocks=6)
    request = make_request("a", list(range(8)))
    compute(manager, request, 8)
    assert manager.get_block_ids("a") == (1, 2)
    decode(manager, request, 1)
    assert manager.get_block_ids("a") == (1, 2, 3)
    decode(manager, request, 1)
    assert manager.get_block_ids("a") == (0, 2, 3)
    snapshot = manager.snapshot()
    assert snapshot.free_order == (4, 5, 6, 1)
    assert snapshot.ref_counts == {2: 1, 3: 1}
    assert set(snapshot.hashes) == {1, 2}  # a freed block keeps its hash


@pytest.mark.parametrize(
    ("window", "block_size", "num_computed", "num_dead"),
    [
        (1, 1, 5, 5),  # the next token sees itself alone
        (1, 4, 7, 1),
        (1, 4, 8, 2),
        (2, 1, 5, 4),
        (4, 4, 6, 0),  # sees 3 to 6
        (4, 4, 7, 1),  # sees 4 to 7
        (5, 4, 7, 0),
        (5, 4, 8, 1),
        (8, 4, 19, 3),  # sees 12 to 19
        (100, 4, 19, 0),
    ],
)
def test_an_entry_is_dead_when_the_window_of_the_next_token_starts_behind_it(
    tier: Tier, window: int, block_size: int, num_computed: int, num_dead: int
) -> None:
    manager = make_manager(tier, window, num_usable_blocks=30, block_size=block_size)
    request = make_request("a", num_computed + 1)
    compute(manager, request, num_computed)
    compute(manager, request, 1)
    table = manager.get_block_ids("a")
    assert len(table) == cdiv(num_computed + 1, block_size)
    assert [block == 0 for block in table] == [i < num_dead for i in range(len(table))]


def test_several_dead_blocks_are_freed_in_one_call_the_later_entries_first(tier: Tier) -> None:
    manager = make_manager(tier, 4, num_usable_blocks=6)
    request = make_request("a", list(range(17)))
    compute(manager, request, 16)
    assert manager.get_block_ids("a") == (1, 2, 3, 4)
    compute(manager, request, 1)  # position 16 sees 13 to 16: three blocks leave at once
    assert manager.get_block_ids("a") == (0, 0, 0, 4, 5)
    assert manager.snapshot().free_order == (6, 3, 2, 1)  # with a hash: at the back, in this order


def test_without_caching_the_dead_blocks_go_to_the_front_as_one_batch_and_serve_the_same_allocation(
    tier: Tier,
) -> None:
    manager = make_manager(tier, 4, num_usable_blocks=6, caching=False)
    request = make_request("a", list(range(17)))
    compute(manager, request, 16)
    assert compute(manager, request, 1) == [3]
    assert manager.get_block_ids("a") == (0, 0, 0, 4, 3)
    assert manager.snapshot().free_order == (2, 1, 5, 6)


def test_what_an_allocation_frees_counts_for_itself(tier: Tier) -> None:
    """The pool of 3 blocks is full; the block of the new token is the one that left the window."""
    manager = make_manager(tier, 8, num_usable_blocks=3)
    request = make_request("a", list(range(13)))
    compute(manager, request, 12)
    assert manager.snapshot().num_free_blocks == 0
    assert compute(manager, request, 1) == [1]
    assert manager.get_block_ids("a") == (0, 2, 3, 1)
    assert set(manager.snapshot().hashes) == {2, 3}  # it was handed out, so its hash is gone


def test_an_allocation_that_cannot_be_met_gives_back_dead_blocks_and_changes_nothing_else(tier: Tier) -> None:
    """They are dead whoever gets them: keeping them would make the request that is preempted next pay for it."""
    manager = make_manager(tier, 4, num_usable_blocks=5)
    request = make_request("a", list(range(40)))
    compute(manager, request, 12)
    assert manager.allocate_slots(request, 28) is None  # 7 blocks, with 2 + 2 free
    manager.check_integrity()
    assert manager.shortage == (7, 4)
    assert manager.get_block_ids("a") == (0, 0, 3)
    snapshot = manager.snapshot()
    assert snapshot.free_order == (4, 5, 2, 1)
    assert set(snapshot.hashes) == {1, 2, 3}
    assert manager.allocate_slots(request, 28) is None
    assert manager.snapshot() == snapshot  # nothing is freed twice


def test_free_gives_back_what_is_left_of_the_table_and_nothing_twice(tier: Tier) -> None:
    manager = make_manager(tier, 6, num_usable_blocks=6)
    request = make_request("a", list(range(8)))
    compute(manager, request, 8)
    decode(manager, request, 2)
    other = make_request("b", [90])
    manager.allocate_slots(other, 1)
    assert manager.get_block_ids("b") == (4,)
    manager.free(request)
    manager.check_integrity()
    assert manager.snapshot().free_order == (3, 5, 6, 1, 2)  # 1 went first, when it left the window
    assert manager.get_block_ids("a") == ()


def test_a_dead_block_that_siblings_share_is_free_when_the_last_of_them_has_passed_it(tier: Tier) -> None:
    manager = make_manager(tier, 4, num_usable_blocks=10)
    parent = make_request("a", list(range(6)), n=2)
    compute(manager, parent, 6)
    sibling = parent.fork(1)
    manager.fork(parent, sibling)
    decode(manager, parent, 1)  # copies block 2, then writes position 6
    assert manager.get_block_ids("a") == (1, 3)
    decode(manager, parent, 1, 600)  # position 7 sees 4 to 7
    assert manager.get_block_ids("a") == (0, 3)
    assert manager.snapshot().ref_counts == {1: 1, 2: 1, 3: 1}
    decode(manager, sibling, 2, 700)
    assert manager.get_block_ids("1_a") == (0, 2)
    assert manager.snapshot().ref_counts == {2: 1, 3: 1}
    manager.free(parent)
    manager.free(sibling)
    manager.check_integrity()
    assert manager.snapshot().num_free_blocks == 10


def test_a_fork_of_a_table_whose_start_is_gone_shares_the_rest(tier: Tier) -> None:
    manager = make_manager(tier, 4, num_usable_blocks=10)
    parent = make_request("a", list(range(14)), n=2)
    compute(manager, parent, 8)
    compute(manager, parent, 6)  # position 8 sees 5 to 8
    assert manager.get_block_ids("a") == (0, 2, 3, 4)
    sibling = parent.fork(1)
    manager.fork(parent, sibling)
    manager.check_integrity()
    assert manager.get_block_ids("1_a") == (0, 2, 3, 4)
    assert manager.snapshot().ref_counts == {2: 2, 3: 2, 4: 2}
    manager.begin_step()
    sibling.all_token_ids.append(99)
    compute_in_step(manager, sibling, 1)  # position 14 sees 11 to 14
    assert manager.get_block_ids("1_a") == (0, 0, 3, 5)
    assert manager.get_block_copy("1_a") == BlockCopy(3, 4, 5)
    manager.free(parent)
    manager.free(sibling)
    manager.check_integrity()
    assert manager.snapshot().num_free_blocks == 10


def test_tokens_accepted_beyond_what_was_registered_may_leave_the_window_unregistered(tier: Tier) -> None:
    """Drafts make computed jump over blocks that were never registered; entries that are gone are passed over."""
    manager = make_manager(tier, 2, num_usable_blocks=12, block_size=1)
    request = make_request("a", [1, 2, 3])
    compute(manager, request, 3)
    request.all_token_ids.append(4)
    manager.begin_step()
    assert manager.allocate_slots(request, 5) == [4, 5, 6, 7, 8]  # one token and four drafts
    request.all_token_ids += [5, 6, 7, 8, 9]  # all are right
    request.num_computed_tokens += 5
    assert manager.get_block_ids("a") == (0, 0, 3, 4, 5, 6, 7, 8)
    compute(manager, request, 1)  # position 8 sees 7 and 8
    assert manager.get_block_ids("a") == (0, 0, 0, 0, 0, 0, 0, 8, 7)
    assert set(manager.snapshot().hashes) == {1, 2, 3, 4, 7, 8}  # 5 and 6 left unregistered
    admit(manager, make_request("b", [90]))
    assert admit(manager, make_request("c", [1, 2, 3, 4, 5, 99])) == [0, 0, 0, 4]
    assert manager.get_block_ids("b") == (6,)
    assert manager.get_block_ids("c") == (0, 0, 0, 4, 5, 9)  # block 5 again holds token 5, but c computed it
    manager.withdraw(request, whole=True)
    manager.check_integrity()
    assert set(manager.snapshot().hashes) == {5, 6, 9}


# Withdrawing


def test_withdraw_whole_takes_back_blocks_that_left_the_window_as_well(tier: Tier) -> None:
    manager = make_manager(tier, 4)
    request = make_request("a", list(range(13)))
    compute(manager, request, 12)
    compute(manager, request, 1)
    assert manager.get_block_ids("a") == (0, 0, 3, 4)
    assert set(manager.snapshot().hashes) == {1, 2, 3}
    manager.withdraw(request, whole=True)
    assert manager.snapshot().hashes == {}
    manager.free(request)
    manager.check_integrity()


def test_withdraw_whole_leaves_alone_what_another_request_has_put_there_since(tier: Tier) -> None:
    manager = make_manager(tier, 4, num_usable_blocks=4)
    request = make_request("a", list(range(13)))
    compute(manager, request, 12)
    compute(manager, request, 1)
    assert manager.snapshot().free_order == (2, 1)
    other = make_request("b", list(range(50, 54)))
    compute(manager, other, 4)
    assert manager.get_block_ids("b") == (2,)
    manager.withdraw(request, whole=True)
    manager.check_integrity()
    assert set(manager.snapshot().hashes) == {2}  # b's own
    assert manager.get_computed_blocks(make_request("c", list(range(50, 55)))) == [2]


def test_withdraw_of_a_step_takes_back_its_registrations_and_no_block_that_left_in_it(tier: Tier) -> None:
    manager = make_manager(tier, 4, num_usable_blocks=8)
    request = make_request("a", list(range(12)))
    compute(manager, request, 8)
    manager.begin_step()
    manager.allocate_slots(request, 4)  # block 1 leaves, block 3 is registered
    assert manager.get_block_ids("a") == (0, 2, 3)
    manager.withdraw(request)
    manager.free(request)
    manager.check_integrity()
    snapshot = manager.snapshot()
    assert set(snapshot.hashes) == {1, 2}
    assert snapshot.free_order == (3, 4, 5, 6, 7, 8, 1, 2)


# Hits


def evict(manager: KVCacheManager, *blocks: int) -> None:
    """Make the cache forget these blocks, as handing them out would."""
    for block in blocks:
        manager.block_pool.uncache_block(block)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("window", "num_needed"),
    [(1, 1), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3), (1000, 5)],  # the window less one token, in blocks of 4
)
def test_b26_a_hit_needs_only_the_blocks_of_the_last_window(tier: Tier, window: int, num_needed: int) -> None:
    manager = make_manager(tier, window)
    first = make_request("a", list(range(21)))
    admit(manager, first)
    manager.free(first)
    expected = [0] * (5 - num_needed) + [1, 2, 3, 4, 5][5 - num_needed :]
    again = make_request("b", list(range(21)))
    assert manager.get_computed_blocks(again) == expected
    evict(manager, *range(1, 6 - num_needed))
    assert manager.get_computed_blocks(again) == expected
    hits = admit(manager, again)
    assert len(hits) == 5
    assert manager.get_block_ids("b")[:5] == tuple(expected)
    assert len(manager.snapshot().ref_counts) == num_needed + 1


@pytest.mark.parametrize(
    ("forgotten", "expected"),
    [
        ((5,), [0, 0, 3, 4]),
        ((4,), [0, 2, 3]),
        ((3,), [0, 0, 0, 4, 5]),
        ((3, 5), [1, 2]),
        ((2, 4), [1]),
        ((1, 3, 5), []),
        ((2, 5), [0, 0, 3, 4]),
        ((1, 2, 3, 4, 5), []),
    ],
)
def test_the_longest_prefix_with_a_whole_window_is_hit_and_else_a_start_that_is_shorter_than_one(
    tier: Tier, forgotten: tuple[int, ...], expected: list[int]
) -> None:
    """W = 6, B = 4: two blocks in a row. Five blocks are cached, then some are forgotten."""
    manager = make_manager(tier, 6)
    first = make_request("a", list(range(21)))
    admit(manager, first)
    manager.free(first)
    evict(manager, *forgotten)
    assert manager.get_computed_blocks(make_request("b", list(range(21)))) == expected


def test_a_hit_takes_blocks_from_the_free_queue_for_the_window_only(tier: Tier) -> None:
    """Four usable blocks: a full hit of three and two fresh ones would not fit, one of two does."""
    manager = make_manager(tier, 8, num_usable_blocks=4)
    first = make_request("a", list(range(12)))
    admit(manager, first)
    manager.free(first)
    request = make_request("b", [*range(12), *range(60, 65)])
    assert admit(manager, request) == [0, 2, 3]
    assert manager.get_block_ids("b") == (0, 2, 3, 4, 1)
    assert manager.snapshot().num_free_blocks == 0
    manager.free(request)
    manager.check_integrity()
    assert manager.snapshot().num_free_blocks == 4


def test_the_blocks_behind_a_hit_are_registered_and_continue_the_chain(tier: Tier) -> None:
    manager = make_manager(tier, 5)
    first = make_request("a", list(range(13)))
    admit(manager, first)
    manager.free(first)
    second = make_request("b", [*range(12), *range(60, 69)])
    assert admit(manager, second) == [0, 0, 3]
    assert admit(manager, make_request("c", [*range(12), *range(60, 69)])) == [0, 0, 0, 0, 5]
    manager.withdraw(second, whole=True)  # its own two blocks; those that it hit stay
    assert set(manager.snapshot().hashes) == {1, 2, 3}


# In the scheduler


def run_alone(tier: Tier, config: EngineConfig, prompt: int, max_tokens: int) -> int:
    """Most blocks that one request holds at any time."""
    driver = Driver(tier, config)
    driver.add(make_request("a", prompt, max_tokens=max_tokens))
    most = 0
    while driver.scheduler.has_unfinished_requests():
        schedule = driver.schedule()
        most = max(most, len(driver.scheduler.snapshot().cache.ref_counts))
        driver.update(schedule, driver.sample(schedule))
    assert len(driver.outputs["a"]) == max_tokens
    driver.assert_nothing_leaked()
    return most


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_long_generation_holds_no_more_blocks_than_its_window_spans(
    tier: Tier, block_size: int, caching: bool
) -> None:
    config = make_config(block_size=block_size, num_usable_blocks=400, caching=caching)
    assert run_alone(tier, config, 10, 290) == cdiv(299, block_size)
    assert run_alone(tier, windowed(config, 32), 10, 290) <= cdiv(32, block_size) + 1


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_long_prompt_in_chunks_holds_its_window_and_the_chunk(tier: Tier, block_size: int) -> None:
    config = make_config(block_size=block_size, num_usable_blocks=400, max_num_batched_tokens=20)
    assert run_alone(tier, config, 290, 5) == cdiv(294, block_size)
    assert run_alone(tier, windowed(config, 32), 290, 5) <= cdiv(32 + 20 - 1, block_size) + 1


def test_two_generations_fit_together_where_one_of_them_would_not_without_freeing(tier: Tier) -> None:
    """B = 4, 20 usable blocks, two requests of 60 tokens: 15 blocks each, but 9 with a window of 32."""
    results = []
    for window in (None, 32):
        driver = Driver(tier, windowed(make_config(num_usable_blocks=20), window))
        driver.add(*(make_request(name, 8, arrival=i, max_tokens=52) for i, name in enumerate("ab")))
        num_steps = len(driver.run())
        driver.assert_nothing_leaked()
        results.append((driver.num_preemptions, num_steps, driver.outputs))
    (without, more_steps, outputs), (with_window, steps, same_outputs) = results
    assert without > 0
    assert with_window == 0
    assert steps == 52
    assert more_steps > 52
    assert outputs == same_outputs


def test_a_preempted_request_resumes_from_the_window_before_its_last_token(tier: Tier) -> None:
    """Its older blocks may be long gone: what it computes again are the tokens of the block that was not full."""
    config = windowed(make_config(num_usable_blocks=9, max_num_seqs=2), 8)
    driver = Driver(tier, config)
    driver.add(make_request("a", 10, max_tokens=60), make_request("b", 26, arrival=1, max_tokens=3))
    driver.run()
    assert driver.num_preemptions >= 1
    alone = Driver(tier, windowed(make_config(), 8))
    alone.add(make_request("b", 26, arrival=1, max_tokens=3))
    alone.run()
    assert driver.outputs["b"] == alone.outputs["b"]
    driver.assert_nothing_leaked()


def test_a_token_that_ends_with_nan_withdraws_blocks_left_of_the_window(tier: Tier) -> None:
    driver = Driver(tier, windowed(make_config(), 4))
    driver.add(make_request("a", 8, max_tokens=20))
    for _ in range(6):
        driver.step()
    assert len(driver.scheduler.snapshot().cache.hashes) == 3
    schedule = driver.schedule()
    output = driver.sample(schedule)
    output.sampled_token_ids.clear()
    driver.update(schedule, replace(output, errors={"a": "NaN"}))
    assert driver.scheduler.snapshot().cache.hashes == {}
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("window", [1, 4, 1000])
def test_the_runner_never_gets_a_slot_of_the_null_block(tier: Tier, window: int) -> None:
    """Every position that a step computes lies in a block that the request holds."""
    config = windowed(make_config(num_usable_blocks=12, max_num_batched_tokens=9), window)
    driver = Driver(tier, config, token_of=scripted_token)
    driver.add(*(make_request(f"r{i}", [7] * (6 + 5 * i), arrival=i, max_tokens=25, n=2) for i in range(3)))
    num_checked = 0
    while driver.scheduler.has_unfinished_requests():
        schedule = driver.schedule()
        for request_id, count in schedule.num_scheduled_tokens.items():
            end = driver.scheduler.requests[request_id].num_computed_tokens
            table = driver.manager.get_block_ids(request_id)
            assert all(table[position // 4] for position in range(end - count, end))
            num_checked += count
        driver.update(schedule, driver.sample(schedule))
    assert num_checked >= 150
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_one_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=f"sliding_window must be at least 1, got {window}"):
        CacheConfig(16, 10, sliding_window=window)


def test_a_hit_that_lies_left_of_the_window_is_no_use_to_what_is_swapped_in(tier: Tier) -> None:
    """Found in 1,000,000 rule steps: the fast tier took such a hit for a null entry, and never gave its block back."""
    config = windowed(make_config(block_size=1, num_usable_blocks=20, num_host_blocks=20), 4)
    manager = tier.make_kv_cache_manager(config)
    request = make_request("a", 8)
    admit(manager, request)
    first, *others = manager.get_block_ids("a")
    decode(manager, request, 1)  # the blocks of the first five tokens leave the window
    manager.begin_step()
    assert manager.swap_out(request)
    evict(manager, *others)
    manager.begin_step()
    hits = manager.get_computed_blocks(request)
    assert hits == [first]
    request.all_token_ids.append(501)
    assert manager.allocate_slots(request, 1, hits) is not None
    manager.check_integrity()
    table = manager.get_block_ids("a")
    assert table.count(0) == table.index(next(filter(None, table))) > 1
    manager.free(request)
    manager.check_integrity()
    assert manager.usage == 0
