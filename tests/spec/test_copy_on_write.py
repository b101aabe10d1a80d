"""n > 1: one prefill, shared blocks, and a copy for each writer but the last. Both tiers; block size 4 unless said."""

from __future__ import annotations

from typing import Any

import pytest

from reference.contracts.config import cdiv
from reference.contracts.protocols import Tier
from reference.contracts.request import Request
from reference.contracts.schedule import ModelRunnerOutput
from tests.factories import Driver, make_config, make_request


def make_driver(tier: Tier, token_of: Any = None, **options: Any) -> Driver:
    return Driver(tier, make_config(**options), *([token_of] if token_of else []))


def test_ten_sequences_of_one_prompt_take_nine_copies_and_72_blocks(tier: Tier) -> None:
    """517 = 32 full blocks of 16 and 5 tokens in a 33rd. 48 tokens more need the tail's block and 3 others each."""
    driver = make_driver(tier, block_size=16, num_usable_blocks=100, max_num_batched_tokens=1024)
    driver.add(make_request("a", 517, n=10, max_tokens=48))
    copies, peak, prefilled = [], 0, []
    while driver.scheduler.has_unfinished_requests():
        schedule = driver.step()
        copies += schedule.block_copies
        prefilled += [count for count in schedule.num_scheduled_tokens.values() if count > 1]
        peak = max(peak, len(driver.scheduler.snapshot().cache.ref_counts))
        if schedule.step == 1:
            assert len(driver.scheduler.snapshot().cache.ref_counts) == 32 + 10
    assert len(copies) == 9
    assert {copy.source for copy in copies} == {33}
    assert prefilled == [517]
    assert peak == 32 + 10 + 30
    assert [len(tokens) for tokens in driver.outputs.values()] == [48] * 10
    driver.assert_nothing_leaked()


def test_a_fork_shares_every_block_and_takes_none(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 6, n=3))
    schedule = driver.schedule()
    num_free = driver.scheduler.snapshot().cache.num_free_blocks
    driver.update(schedule, driver.sample(schedule))
    state = driver.scheduler.snapshot()
    assert state.running == ("a", "1_a", "2_a")
    assert state.cache.block_tables == {"a": (1, 2), "1_a": (1, 2), "2_a": (1, 2)}
    assert state.cache.ref_counts == {1: 3, 2: 3}
    assert state.cache.num_free_blocks == num_free


def test_each_writer_but_the_last_gets_a_copy_in_place_of_the_shared_block(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 6, n=3))
    driver.step()
    schedule = driver.step()
    assert [(copy.index, copy.source, copy.target) for copy in schedule.block_copies] == [
        (1, 2, 3),
        (1, 2, 4),
    ]
    assert driver.scheduler.snapshot().cache.block_tables == {"a": (1, 3), "1_a": (1, 4), "2_a": (1, 2)}
    assert driver.scheduler.snapshot().cache.ref_counts == {1: 3, 2: 1, 3: 1, 4: 1}
    (delta,) = schedule.scheduled_running_reqs  # the parent is known to the runner, its siblings are new
    assert delta.block_copy == schedule.block_copies[0]
    assert delta.new_block_ids == ()
    assert [(new.request_id, new.block_ids) for new in schedule.scheduled_new_reqs] == [
        ("1_a", (1, 4)),
        ("2_a", (1, 2)),
    ]
    assert driver.step().block_copies == ()  # everybody has a block of its own now


def test_a_block_with_one_holder_is_written_in_place(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 6, n=2))
    driver.step()
    driver.abort("1_a")
    assert driver.step().block_copies == ()
    assert driver.scheduler.snapshot().cache.block_tables == {"a": (1, 2)}


def test_a_prompt_of_whole_blocks_needs_no_copy(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 8, n=3))
    driver.step()
    schedule = driver.step()
    assert schedule.block_copies == ()
    assert driver.scheduler.snapshot().cache.block_tables == {
        "a": (1, 2, 3),
        "1_a": (1, 2, 4),
        "2_a": (1, 2, 5),
    }


def test_siblings_without_a_slot_keep_their_token_and_wait_ahead_of_later_arrivals(tier: Tier) -> None:
    driver = make_driver(tier, max_num_seqs=2)
    driver.add(make_request("a", 6, n=4, max_tokens=3), make_request("late", 5, arrival=1, max_tokens=1))
    assert driver.step().num_scheduled_tokens == {"a": 6, "late": 5}
    state = driver.scheduler.snapshot()
    assert state.running == ("a", "1_a")  # late has ended
    assert state.waiting == ("2_a", "3_a")
    assert {name: len(tokens) for name, tokens in driver.outputs.items()} == {
        "a": 1, "1_a": 1, "2_a": 1, "3_a": 1, "late": 1,
    }  # fmt: skip
    assert set(state.cache.block_tables) == {"a", "1_a"}
    driver.add(make_request("later", 5, arrival=2, max_tokens=1))
    assert driver.scheduler.snapshot().waiting == ("2_a", "3_a", "later")
    driver.step()
    driver.step()
    schedule = (
        driver.step()
    )  # a and 1_a have ended: 2_a comes back as prompt + 1 token and finds the prompt cached
    (first, *_) = schedule.scheduled_new_reqs
    assert (first.request_id, len(first.token_ids), first.num_computed_tokens) == ("2_a", 7, 4)
    driver.run()
    assert all(len(tokens) == 3 for name, tokens in driver.outputs.items() if name.endswith("a"))
    driver.assert_nothing_leaked()


def test_each_sequence_counts_in_max_num_seqs(tier: Tier) -> None:
    driver = make_driver(tier, max_num_seqs=3)
    driver.add(make_request("a", 6, n=3, max_tokens=4))
    driver.step()
    driver.add(make_request("b", 5, arrival=1))
    assert "b" not in driver.step().num_scheduled_tokens


def outputs_of(tier: Tier, num_usable_blocks: int, **options: Any) -> Driver:
    driver = make_driver(tier, num_usable_blocks=num_usable_blocks, **options)
    driver.add(make_request("a", 3 * 4 + 1, n=4, max_tokens=7))
    driver.run()
    driver.assert_nothing_leaked()
    return driver


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_b15_a_pool_with_room_for_two_copies_only_still_serves_all_four(tier: Tier, policy: str) -> None:
    """The prompt takes 4 blocks; a pool of 6 has room for two copies, where three are wanted."""
    tight = outputs_of(tier, 6, scheduling_policy=policy)
    ample = outputs_of(tier, 60)
    assert tight.num_preemptions > 0
    assert ample.num_preemptions == 0
    assert tight.outputs == ample.outputs
    assert len(ample.outputs) == 4


def test_the_copy_of_a_victim_of_the_same_step_is_taken_out_of_the_schedule(tier: Tier) -> None:
    """Under the priority policy the largest arrival leaves although it was planned before; its copy must go too."""
    driver = make_driver(tier, num_usable_blocks=5, scheduling_policy="priority")
    driver.add(make_request("low", 6, priority=5, n=2))
    driver.step()  # two blocks, shared by low and 1_low
    driver.add(make_request("high", 7, arrival=1, priority=0))
    driver.step()  # low copies its tail (block 3), 1_low writes in place; high takes blocks 4 and 5
    state = driver.scheduler.snapshot()
    assert state.cache.block_tables == {"low": (1, 3), "1_low": (1, 2), "high": (4, 5)}
    for _ in range(2):
        schedule = driver.step()
    assert schedule.preempted_req_ids[0] == "1_low"
    assert schedule.block_copies == ()
    driver.run()
    driver.assert_nothing_leaked()


def test_a_victim_that_had_planned_a_copy_leaves_no_copy_behind(tier: Tier) -> None:
    driver = make_driver(tier, num_usable_blocks=4, scheduling_policy="priority")
    driver.add(make_request("high", 7, priority=0))
    driver.step()  # two blocks; its eighth token still fits
    driver.add(make_request("low", 5, arrival=1, priority=5, n=2))
    driver.step()  # high 8 tokens; low two blocks, shared with 1_low; nothing is free
    assert driver.scheduler.snapshot().running == ("high", "low", "1_low")
    schedule = driver.step()  # high needs a third block: 1_low leaves, low now is the only holder of its tail
    assert schedule.preempted_req_ids == ("1_low", "low")
    assert schedule.block_copies == ()
    assert schedule.num_scheduled_tokens == {"high": 1}


def test_sequences_that_end_with_their_first_token_leave_the_others_alone(tier: Tier) -> None:
    def token_of(request: Request) -> int:
        return 7 if request.arrival[1] in (0, 2) else 40_000 + request.num_output_tokens

    driver = make_driver(tier, token_of)
    driver.add(make_request("a", 6, n=4, max_tokens=5, stop_token_ids=[7]))
    driver.step()
    assert driver.finish_reasons == {"a": "stop", "2_a": "stop"}
    assert driver.scheduler.snapshot().running == ("1_a", "3_a")
    driver.run()
    assert [len(driver.outputs[name]) for name in ("a", "1_a", "2_a", "3_a")] == [1, 5, 1, 5]
    driver.assert_nothing_leaked()


def test_broken_logits_of_the_prompt_end_all_sequences(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 6, n=3))
    schedule = driver.schedule()
    driver.update(schedule, ModelRunnerOutput({}, errors={"a": "NaN"}))
    assert driver.finish_reasons == {"a": "error", "1_a": "error", "2_a": "error"}
    driver.assert_nothing_leaked()


def test_a_failed_prefill_ends_all_sequences(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 6, n=3))
    news = driver.scheduler.fail_step(driver.schedule(), "out of luck")
    assert [item.request_id for item in news] == ["a", "1_a", "2_a"]
    driver.assert_nothing_leaked()


def test_a_failed_step_of_one_sequence_ends_only_that_one(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 6, n=2, max_tokens=3))
    driver.step()
    schedule = driver.schedule()
    sampled = driver.sample(schedule).sampled_token_ids
    del sampled["1_a"]
    driver.update(schedule, ModelRunnerOutput(sampled, errors={"1_a": "NaN"}))
    driver.run()
    assert driver.finish_reasons == {"a": "length", "1_a": "error"}
    driver.assert_nothing_leaked()


def test_a_preempted_parent_in_mid_prompt_still_gets_its_siblings(tier: Tier) -> None:
    driver = make_driver(tier, num_usable_blocks=5, caching=False, max_num_batched_tokens=8)
    driver.add(make_request("old", 7, max_tokens=10), make_request("a", 12, arrival=1, n=2, max_tokens=2))
    driver.run()
    assert {name: len(tokens) for name, tokens in driver.outputs.items()} == {"old": 10, "a": 2, "1_a": 2}
    driver.assert_nothing_leaked()


def test_the_sequences_have_the_prompts_cached_blocks_and_their_own_tokens(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 9, n=2, max_tokens=6))
    driver.run()
    assert driver.outputs["a"] != driver.outputs["1_a"]
    again = make_request("b", 9, arrival=1)
    again.all_token_ids[:] = make_request("a", 9).all_token_ids
    assert len(driver.manager.get_computed_blocks(again)) == cdiv(9, 4) - 1
