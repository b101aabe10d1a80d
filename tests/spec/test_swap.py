"""Preemption by swap, worked out by hand on both tiers. Block size 4; tokens are scripted, there is no model.

The driver's ledger checks what the schedules alone do not show: whoever reads a slot finds there what it wrote.
"""

from __future__ import annotations

from typing import Any

import pytest

from reference.contracts.protocols import Tier
from reference.contracts.request import RequestStatus
from reference.contracts.schedule import BlockSwap
from tests.factories import Driver, make_config, make_request


def make_driver(tier: Tier, num_usable_blocks: int = 4, num_host_blocks: int = 10, **options: Any) -> Driver:
    config = make_config(
        num_usable_blocks=num_usable_blocks,
        num_host_blocks=num_host_blocks,
        **{"preemption_mode": "swap", **options},
    )
    return Driver(tier, config)


def crowd(driver: Driver, max_tokens: int = 4) -> None:
    """Two requests of two blocks each in a pool of four: the third step needs a fifth block."""
    driver.add(
        make_request("a", 7, max_tokens=max_tokens), make_request("b", 7, arrival=1, max_tokens=max_tokens)
    )
    driver.step()
    driver.step()


def test_a_victims_computed_blocks_go_to_the_host_pool(tier: Tier) -> None:
    driver = make_driver(tier)
    crowd(driver)
    schedule = driver.step()
    assert schedule.preempted_req_ids == ("b",)
    assert schedule.swap_outs == (BlockSwap(3, 1), BlockSwap(4, 2))
    snapshot = driver.scheduler.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.swapped) == (("a",), (), ("b",))
    assert snapshot.cache.host_tables == {"b": (1, 2)}
    assert driver.scheduler.requests["b"].num_computed_tokens == 8
    assert driver.scheduler.requests["b"].status is RequestStatus.SWAPPED


def test_the_reason_says_that_the_blocks_were_swapped_out(tier: Tier) -> None:
    driver = make_driver(tier)
    crowd(driver)
    driver.step()
    assert driver.scheduler.notes is not None
    assert driver.scheduler.notes.preempted == {
        "b": "preempted b: a needed 1 block, 0 free, b arrived last; 2 blocks swapped out"
    }


def test_a_resumed_request_reuses_what_the_cache_still_has_and_copies_only_the_rest_back(tier: Tier) -> None:
    driver = make_driver(tier)
    crowd(driver)
    driver.step()  # a took block 4, the tail of b; block 3, its head, keeps its hash
    driver.step()  # a ends
    schedule = driver.step()
    (resumed,) = schedule.scheduled_new_reqs
    assert resumed.request_id == "b"
    assert (resumed.num_cached_tokens, resumed.num_computed_tokens) == (4, 8)
    assert resumed.block_ids[0] == 3
    assert schedule.swap_ins == (BlockSwap(resumed.block_ids[1], 2),)
    assert schedule.num_scheduled_tokens == {"b": 1}, "nothing is computed twice"
    assert driver.scheduler.snapshot().cache.host_tables == {}
    driver.run()
    assert len(driver.outputs["b"]) == 4
    driver.assert_nothing_leaked()


def test_without_prefix_caching_everything_is_copied_back(tier: Tier) -> None:
    driver = make_driver(tier, caching=False)
    crowd(driver)
    driver.step()
    driver.step()
    schedule = driver.step()
    (resumed,) = schedule.scheduled_new_reqs
    assert schedule.swap_ins == tuple(map(BlockSwap, resumed.block_ids[:2], (1, 2)))
    assert (resumed.num_cached_tokens, resumed.num_computed_tokens) == (0, 8)
    assert schedule.num_scheduled_tokens == {"b": 1}


def test_a_full_host_pool_falls_back_to_recompute(tier: Tier) -> None:
    driver = make_driver(tier, num_host_blocks=1)
    crowd(driver)
    schedule = driver.step()
    assert schedule.preempted_req_ids == ("b",)
    assert schedule.swap_outs == ()
    snapshot = driver.scheduler.snapshot()
    assert (snapshot.waiting, snapshot.swapped) == (("b",), ())
    assert driver.scheduler.requests["b"].num_computed_tokens == 0
    assert driver.scheduler.notes is not None
    assert driver.scheduler.notes.preempted["b"].endswith(
        "; to be computed again, the host pool has 1 of 2 blocks"
    )
    driver.run()
    driver.assert_nothing_leaked()


def test_under_fcfs_a_swapped_request_resumes_before_those_that_wait(tier: Tier) -> None:
    driver = make_driver(tier)
    crowd(driver)
    driver.step()
    driver.add(make_request("c", 2, arrival=2, max_tokens=2))  # it would fit at once
    driver.step()
    assert driver.scheduler.snapshot().swapped == ("b",)
    assert "c" not in driver.scheduler.snapshot().running, "c must not overtake b"
    assert driver.scheduler.notes is not None
    assert driver.scheduler.notes.refused == {"b": "b waits: needs 3 blocks, 1 free"}
    assert [new.request_id for new in driver.step().scheduled_new_reqs] == ["b", "c"]


@pytest.mark.parametrize(("priority", "order"), [(0, ["c", "b"]), (2, ["b", "c"])])
def test_under_priority_one_order_covers_swapped_and_waiting(
    tier: Tier, priority: int, order: list[str]
) -> None:
    driver = make_driver(tier, num_usable_blocks=4, scheduling_policy="priority")
    driver.add(make_request("a", 7, priority=0, max_tokens=4))
    driver.add(make_request("b", 7, arrival=1, priority=1, max_tokens=4))
    for _ in range(3):
        driver.step()
    assert driver.scheduler.snapshot().swapped == ("b",)
    driver.add(make_request("c", 7, arrival=2, priority=priority, max_tokens=1))
    driver.step()
    admitted: list[str] = []
    while driver.scheduler.has_unfinished_requests():
        admitted += [new.request_id for new in driver.step().scheduled_new_reqs]
    assert admitted == order


def test_several_victims_of_one_step_keep_their_old_order(tier: Tier) -> None:
    driver = make_driver(tier, num_usable_blocks=6, num_host_blocks=6, caching=False)
    driver.add(make_request("a", 7), *(make_request(name, 7, arrival=i) for i, name in enumerate("bc", 1)))
    for _ in range(2):
        driver.step()
    victims = []
    while not driver.scheduler.snapshot().swapped[1:]:
        victims += driver.step().preempted_req_ids
    assert victims == ["c", "b"]
    assert driver.scheduler.snapshot().swapped == ("b", "c")


def test_a_victim_with_a_pending_copy_saves_the_block_it_would_have_been_copied_from(tier: Tier) -> None:
    driver = make_driver(
        tier, scheduling_policy="priority", caching=False, max_num_batched_tokens=8, max_num_seqs=4
    )
    driver.add(make_request("p", 6, priority=1, n=2, max_tokens=5))
    driver.add(make_request("q", 12, arrival=1, priority=2, max_tokens=1))
    driver.step()  # p and its sibling share blocks 1 and 2, q has block 3
    driver.scheduler.requests["q"].sort_key = (0, (1, 0), "q")  # now it outranks them
    schedule = driver.schedule()
    # p was given block 4 for its copy of block 2; then q needs two blocks, and both give way.
    assert schedule.preempted_req_ids == ("1_p", "p")
    assert schedule.swap_outs == (BlockSwap(1, 1), BlockSwap(2, 2), BlockSwap(1, 3), BlockSwap(2, 4))
    assert schedule.block_copies == ()
    driver.update(schedule, driver.sample(schedule))
    driver.run()
    assert {name: len(tokens) for name, tokens in driver.outputs.items()} == {"p": 5, "1_p": 5, "q": 1}
    driver.assert_nothing_leaked()


def test_abort_of_a_swapped_request_frees_the_host_pool(tier: Tier) -> None:
    driver = make_driver(tier)
    crowd(driver)
    driver.step()
    driver.abort("b")
    assert driver.scheduler.snapshot().swapped == ()
    driver.run()
    driver.assert_nothing_leaked()
    assert driver.finish_reasons == {"a": "length"}


def test_a_failed_step_forgets_what_it_was_to_save(tier: Tier) -> None:
    """Nobody knows whether the swap-outs were done: the victim is computed again."""
    driver = make_driver(tier)
    crowd(driver)
    schedule = driver.schedule()
    assert schedule.swap_outs
    driver.scheduler.fail_step(schedule, "planned failure")
    driver.scheduler.check_integrity()
    snapshot = driver.scheduler.snapshot()
    assert (snapshot.waiting, snapshot.swapped, snapshot.cache.host_tables) == (("b",), (), {})
    driver.run()
    assert len(driver.outputs["b"]) == 4
    driver.assert_nothing_leaked()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_tokens_are_those_of_recompute_and_of_an_ample_pool(tier: Tier, policy: str) -> None:
    results = []
    for options in ({"num_usable_blocks": 100}, {"preemption_mode": "recompute"}, {}):
        driver = make_driver(tier, **{"num_usable_blocks": 9, "scheduling_policy": policy, **options})
        driver.add(
            *(make_request(f"r{i}", 5 + i, arrival=i, priority=i % 2, max_tokens=11) for i in range(6))
        )
        driver.run()
        driver.assert_nothing_leaked()
        results.append(driver.outputs)
        assert (driver.num_preemptions > 0) == ("num_usable_blocks" not in options)
    assert results[0] == results[1] == results[2]
