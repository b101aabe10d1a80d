"""Other limits in the middle of a run, as "what if" in the app asks for them; on both tiers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from reference.contracts.protocols import Tier
from reference.frontend.tiers import load_tier
from tests.factories import Driver, make_config, make_request


def make_driver(tier: Tier, count: int, **options: Any) -> Driver:
    """With so many requests, the first the least urgent."""
    driver = Driver(tier, make_config(**options))
    driver.add(*(make_request(f"r{i}", 5, arrival=i, priority=-i, max_tokens=6) for i in range(count)))
    return driver


def reconfigure(driver: Driver, **changes: Any) -> None:
    config = replace(driver.config, scheduler=replace(driver.config.scheduler, **changes))
    driver.scheduler.reconfigure(config.scheduler)
    driver.config = config
    driver.scheduler.check_integrity()


def test_a_new_budget_counts_from_the_next_step_on(tier: Tier) -> None:
    driver = make_driver(tier, 3)
    assert driver.step().num_scheduled_tokens == {"r0": 5, "r1": 5, "r2": 5}
    reconfigure(driver, max_num_batched_tokens=2)
    assert driver.step().num_scheduled_tokens == {"r0": 1, "r1": 1}
    driver.run()
    driver.assert_nothing_leaked()


def test_with_fewer_slots_nobody_is_stopped_but_nobody_starts_either(tier: Tier) -> None:
    driver = make_driver(tier, 5, max_num_seqs=4)
    driver.step()
    reconfigure(driver, max_num_seqs=2)
    while len(driver.step().num_scheduled_tokens) == 4:
        assert driver.scheduler.snapshot().waiting == ("r4",)
    assert driver.scheduler.snapshot().running == ("r4",)
    driver.run()
    assert {name: len(tokens) for name, tokens in driver.outputs.items()} == {f"r{i}": 6 for i in range(5)}
    driver.assert_nothing_leaked()


def test_siblings_that_come_when_too_many_run_wait(tier: Tier) -> None:
    driver = make_driver(tier, 3, max_num_seqs=4, max_num_batched_tokens=18)
    driver.add(make_request("many", 8, arrival=3, n=4, max_tokens=3))
    driver.step()  # three whole prompts, and three tokens of the last one
    reconfigure(driver, max_num_seqs=2)
    driver.step()
    assert driver.scheduler.snapshot().running == ("r0", "r1", "r2", "many")
    assert driver.scheduler.snapshot().waiting == ("1_many", "2_many", "3_many")
    driver.run()
    driver.assert_nothing_leaked()


def test_who_waits_is_put_in_order_of_urgency_and_then_stays_in_it(tier: Tier) -> None:
    driver = make_driver(tier, 5, max_num_seqs=1)
    driver.step()
    assert driver.scheduler.snapshot().waiting == ("r1", "r2", "r3", "r4")
    reconfigure(driver, scheduling_policy="priority")
    assert driver.scheduler.snapshot().waiting == ("r4", "r3", "r2", "r1")
    reconfigure(driver, scheduling_policy="fcfs")
    driver.add(make_request("new", 5, arrival=9, priority=-9, max_tokens=2))
    assert driver.scheduler.snapshot().waiting == ("r4", "r3", "r2", "r1", "new")
    driver.run()
    driver.assert_nothing_leaked()


def test_the_next_victim_is_treated_in_the_new_way(tier: Tier) -> None:
    driver = make_driver(tier, 3, num_usable_blocks=7, num_host_blocks=7, caching=False)
    reconfigure(driver, preemption_mode="swap")
    while not (schedule := driver.step()).preempted_req_ids:
        assert not schedule.swap_outs
    assert schedule.swap_outs
    assert driver.scheduler.snapshot().swapped == ("r2",)
    reconfigure(driver, preemption_mode="recompute")  # the saved blocks come back all the same
    driver.run()
    driver.assert_nothing_leaked()


def test_the_longest_length_cannot_change(tier: Tier) -> None:
    driver = make_driver(tier, 1)
    with pytest.raises(ValueError, match="max_model_len cannot change in mid-run"):
        reconfigure(driver, max_model_len=999)


CHANGES: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 1}, {"max_num_seqs": 8}, {"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 64},
    {"long_prefill_token_threshold": 3}, {"long_prefill_token_threshold": 0}, {"scheduling_policy": "priority"},
    {"scheduling_policy": "fcfs"}, {"preemption_mode": "swap"}, {"preemption_mode": "recompute"},
    {"max_num_partial_prefills": 1}, {"max_num_partial_prefills": 0},
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_both_tiers_take_any_change_at_any_step_alike(seed: int) -> None:
    def play(tier_name: str) -> tuple[list[Any], dict[str, list[int]]]:
        rng = random.Random(seed)
        config = make_config(
            num_usable_blocks=14, num_host_blocks=9, max_num_seqs=4, max_num_batched_tokens=32
        )
        driver, schedules = Driver(load_tier(tier_name), config), []
        for step in range(60):
            if step < 30 and rng.random() < 0.6:
                prompt, priority = rng.randint(1, 20), rng.randint(0, 3)
                driver.add(
                    make_request(
                        f"r{step}", prompt, arrival=step, priority=priority, max_tokens=rng.randint(1, 12)
                    )
                )
            if rng.random() < 0.3:
                reconfigure(driver, **rng.choice(CHANGES))
            if driver.scheduler.has_unfinished_requests():
                schedule = driver.step()
                schedules.append(
                    (schedule.num_scheduled_tokens, schedule.preempted_req_ids, schedule.swap_outs)
                )
                schedules.append(driver.scheduler.snapshot())
        driver.run()
        driver.assert_nothing_leaked()
        return schedules, driver.outputs

    assert play("reference") == play("fast")
