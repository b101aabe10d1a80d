"""Schedules worked out by hand, on both tiers. Block size 4 unless said; tokens are scripted, there is no model."""

from __future__ import annotations

from typing import Any

import pytest

from reference.contracts.protocols import Tier
from reference.contracts.request import RequestStatus
from reference.contracts.schedule import ModelRunnerOutput
from tests.factories import Driver, make_config, make_request, scripted_token


def make_driver(tier: Tier, **options: Any) -> Driver:
    return Driver(tier, make_config(**options))


def scheduled(driver: Driver) -> dict[str, int]:
    return driver.step().num_scheduled_tokens


def test_the_first_step_schedules_every_prompt_that_fits(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(*(make_request(f"r{i}", 10 + i, arrival=i, max_tokens=2) for i in range(5)))
    assert scheduled(driver) == {"r0": 10, "r1": 11, "r2": 12, "r3": 13, "r4": 14}
    assert driver.scheduler.snapshot().waiting == ()
    assert scheduled(driver) == dict.fromkeys(("r0", "r1", "r2", "r3", "r4"), 1)
    driver.assert_nothing_leaked()


def test_tokens_per_request_add_up_to_prompt_plus_output_minus_one(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 9, max_tokens=7))
    total = sum(schedule.num_scheduled_tokens["a"] for schedule in driver.run())
    assert total == 9 + 7 - 1
    assert len(driver.outputs["a"]) == 7
    assert driver.finish_reasons == {"a": "length"}


def test_the_budget_is_shared_and_a_long_prompt_is_chunked(tier: Tier) -> None:
    driver = make_driver(tier, max_num_batched_tokens=16)
    driver.add(make_request("a", 10, max_tokens=4), make_request("b", 20, arrival=1, max_tokens=4))
    assert scheduled(driver) == {"a": 10, "b": 6}
    assert scheduled(driver) == {"a": 1, "b": 14}  # the last chunk: b samples its first token now
    assert scheduled(driver) == {"a": 1, "b": 1}


def test_only_the_last_chunk_of_a_prompt_samples_a_token(tier: Tier) -> None:
    driver = make_driver(tier, max_num_batched_tokens=8)
    driver.add(make_request("a", 20, max_tokens=2))
    counts = []
    while driver.scheduler.has_unfinished_requests():
        driver.step()
        counts.append(len(driver.outputs["a"]))
    assert counts == [0, 0, 1, 2]


def test_long_prefill_threshold_shares_the_budget_among_long_prompts(tier: Tier) -> None:
    driver = make_driver(
        tier,
        block_size=16,
        num_usable_blocks=200,
        max_num_batched_tokens=1024,
        long_prefill_token_threshold=400,
    )
    driver.add(*(make_request(f"r{i}", 800, arrival=i) for i in range(3)))
    assert list(driver.step().num_scheduled_tokens.values()) == [400, 400, 224]
    assert list(driver.step().num_scheduled_tokens.values()) == [400, 400, 224]
    assert list(driver.step().num_scheduled_tokens.values()) == [1, 1, 352]


def test_long_prefill_threshold_does_not_hold_up_a_lone_request(tier: Tier) -> None:
    driver = make_driver(tier, max_num_batched_tokens=64, long_prefill_token_threshold=8)
    driver.add(make_request("a", 40, max_tokens=2))
    assert scheduled(driver) == {"a": 40}


def test_without_chunked_prefill_a_long_head_is_not_overtaken(tier: Tier) -> None:
    driver = make_driver(tier, max_num_batched_tokens=16, max_model_len=16, enable_chunked_prefill=False)
    driver.add(
        make_request("a", 10, max_tokens=1),
        make_request("b", 12, arrival=1, max_tokens=1),
        make_request("c", 2, arrival=2, max_tokens=1),
    )
    assert scheduled(driver) == {"a": 10}  # c would fit into the remaining 6 tokens, but b is first
    assert scheduled(driver) == {"b": 12, "c": 2}


def test_max_num_seqs_limits_the_running_requests(tier: Tier) -> None:
    driver = make_driver(tier, max_num_seqs=2)
    driver.add(*(make_request(f"r{i}", 4, arrival=i, max_tokens=2) for i in range(3)))
    assert scheduled(driver) == {"r0": 4, "r1": 4}
    assert scheduled(driver) == {"r0": 1, "r1": 1}
    assert scheduled(driver) == {"r2": 4}


def test_the_first_waiting_request_that_does_not_fit_ends_admission(tier: Tier) -> None:
    driver = make_driver(tier, num_usable_blocks=5)
    driver.add(
        make_request("a", 8, max_tokens=5),
        make_request("big", 16, arrival=1),
        make_request("small", 4, arrival=2),
    )
    assert scheduled(driver) == {"a": 8}
    assert driver.scheduler.snapshot().waiting == ("big", "small")


def test_preemption_takes_the_last_running_request_and_returns_it_to_the_head(tier: Tier) -> None:
    # a and b hold 2 of 4 blocks each and both need a third: b leaves, a goes on, b comes back with its output.
    driver = make_driver(tier, num_usable_blocks=4, caching=False)
    driver.add(make_request("a", 8, max_tokens=6), make_request("b", 8, arrival=1, max_tokens=6))
    assert scheduled(driver) == {"a": 8, "b": 8}
    schedule = driver.step()
    assert schedule.num_scheduled_tokens == {"a": 1}
    assert schedule.preempted_req_ids == ("b",)
    state = driver.scheduler.snapshot()
    assert (state.running, state.waiting) == (("a",), ("b",))
    assert driver.scheduler.requests["b"].status is RequestStatus.PREEMPTED
    assert driver.scheduler.requests["b"].num_computed_tokens == 0
    driver.run()
    assert driver.finish_reasons == {"a": "length", "b": "length"}
    driver.assert_nothing_leaked()


def test_nobody_is_admitted_in_a_step_that_preempted(tier: Tier) -> None:
    driver = make_driver(
        tier, num_usable_blocks=4, caching=False, max_num_seqs=2, scheduling_policy="priority"
    )
    driver.add(make_request("low", 8, priority=5))
    driver.step()
    driver.add(
        make_request("high", 3, arrival=1, priority=0), make_request("small", 1, arrival=2, priority=1)
    )
    assert scheduled(driver) == {"low": 1, "high": 3}  # low's third block, and high's first: the pool is full
    assert scheduled(driver) == {"low": 1, "high": 1}
    schedule = driver.step()  # high's fifth token needs a block
    assert schedule.preempted_req_ids == ("low",)
    assert schedule.scheduled_new_reqs == ()  # a slot and two blocks are free, and small waits all the same
    assert driver.step().scheduled_new_reqs[0].request_id == "small"


def test_several_victims_keep_their_old_order_at_the_head_of_the_queue(tier: Tier) -> None:
    driver = make_driver(tier, num_usable_blocks=6, caching=False, max_num_batched_tokens=12)
    driver.add(
        make_request("a", 16, max_tokens=8), make_request("b", 4, arrival=1), make_request("c", 4, arrival=2)
    )
    assert scheduled(driver) == {"a": 12}
    assert scheduled(driver) == {"a": 4, "b": 4, "c": 4}
    driver.add(make_request("late", 4, arrival=3))
    # a needs a fifth block, b and c a second each: 6 blocks are held, none is free.
    schedule = driver.step()
    assert schedule.preempted_req_ids == ("c", "b")
    assert driver.scheduler.snapshot().waiting == ("b", "c", "late")
    assert schedule.num_scheduled_tokens == {"a": 1}


def test_a_resumed_request_arrives_at_the_runner_as_new_with_its_output(tier: Tier) -> None:
    driver = make_driver(tier, num_usable_blocks=4, caching=False)
    driver.add(make_request("a", 8, max_tokens=3), make_request("b", 8, arrival=1, max_tokens=6))
    driver.step()
    driver.step()  # b is preempted with one output token
    driver.step()  # a ends
    (resumed,) = driver.step().scheduled_new_reqs
    assert resumed.request_id == "b"
    assert len(resumed.token_ids) == 9
    assert resumed.num_prompt_tokens == 8
    assert resumed.num_computed_tokens == 0


def test_b03_a_resumed_request_that_hits_its_own_old_blocks_computes_only_the_rest(tier: Tier) -> None:
    driver = make_driver(tier, num_usable_blocks=4)
    driver.add(make_request("a", 8, max_tokens=3), make_request("b", 8, arrival=1, max_tokens=6))
    driver.step()
    driver.step()  # b is preempted: blocks 3 and 4 keep their hashes, and a takes the older of them
    driver.step()
    schedule = driver.step()
    (resumed,) = schedule.scheduled_new_reqs
    assert resumed.num_computed_tokens == 4
    assert schedule.num_scheduled_tokens == {"b": 5}  # 9 known tokens - 4 cached
    driver.run()
    assert len(driver.outputs["b"]) == 6


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_b11_no_token_is_lost_or_doubled_across_preemption_at_a_block_border(tier: Tier, offset: int) -> None:
    """The sequence holds B - 1, B or B + 1 tokens beyond a whole block when it is preempted."""

    def outputs(num_usable_blocks: int) -> tuple[dict[str, list[int]], int]:
        driver = make_driver(tier, num_usable_blocks=num_usable_blocks)
        driver.add(
            make_request("a", 8, max_tokens=12), make_request("b", 8 + offset, arrival=1, max_tokens=12)
        )
        driver.run()
        driver.assert_nothing_leaked()
        return driver.outputs, driver.num_preemptions

    tight, preemptions = outputs(7)
    ample, none = outputs(50)
    assert preemptions > 0
    assert none == 0
    assert tight == ample
    assert [len(tokens) for tokens in tight.values()] == [12, 12]


def test_forced_preemption_recipe_gives_the_tokens_of_an_ample_pool(tier: Tier) -> None:
    def run(num_usable_blocks: int) -> tuple[dict[str, list[int]], int]:
        driver = make_driver(tier, block_size=16, num_usable_blocks=num_usable_blocks)
        driver.add(*(make_request(f"r{i}", 34, arrival=i, max_tokens=35) for i in range(2)))
        driver.run()
        return driver.outputs, driver.num_preemptions

    tight, preemptions = run(7)
    ample, none = run(11)
    assert preemptions > 0
    assert none == 0
    assert tight == ample


def test_d1_blocks_registered_in_the_step_of_a_preemption_are_withdrawn(tier: Tier) -> None:
    """The victim was already planned, and block 4 registered for tokens that are now never computed."""
    driver = make_driver(
        tier,
        num_usable_blocks=6,
        scheduling_policy="priority",
        max_num_batched_tokens=9,
        long_prefill_token_threshold=5,
    )
    driver.add(make_request("low", 24, priority=5, max_tokens=2))
    assert scheduled(driver) == {"low": 9}  # alone: no chunk limit; blocks 1, 2 and a part of 3
    driver.add(make_request("high", 4, arrival=1, priority=0, max_tokens=2))
    assert scheduled(driver) == {"low": 5, "high": 4}  # low: blocks 1 to 4, three of them full; high: block 5
    schedule = (
        driver.schedule()
    )  # low: 5 tokens fill block 4 and open block 6; high's fifth token needs a seventh
    assert schedule.preempted_req_ids == ("low",)
    assert schedule.num_scheduled_tokens == {"high": 1}
    cache = driver.scheduler.snapshot().cache
    assert cache.block_tables == {"high": (5, 6)}
    assert cache.free_order == (4, 3, 2, 1)
    assert set(cache.hashes) == {1, 2, 3, 5}


def test_a_victim_scheduled_in_the_same_step_returns_its_tokens_to_the_budget(tier: Tier) -> None:
    driver = make_driver(
        tier,
        num_usable_blocks=9,
        scheduling_policy="priority",
        max_num_batched_tokens=12,
        long_prefill_token_threshold=7,
    )
    driver.add(make_request("low", 30, priority=5))
    assert scheduled(driver) == {"low": 12}  # 3 blocks
    driver.add(make_request("high", 4, arrival=1, priority=0), make_request("mid", 30, arrival=2, priority=1))
    assert scheduled(driver) == {"low": 7, "high": 4, "mid": 1}  # 5 + 1 + 1 blocks
    schedule = driver.step()  # low takes 7 tokens and the last 2 blocks, then leaves for high
    assert schedule.preempted_req_ids == ("low",)
    assert schedule.num_scheduled_tokens == {"high": 1, "mid": 7}  # only 4 were left if low had kept its 7


def test_when_the_victim_stood_before_the_current_request_nobody_is_skipped(tier: Tier) -> None:
    driver = make_driver(tier, num_usable_blocks=6, scheduling_policy="priority", caching=False)
    driver.add(make_request("low", 8, priority=9, max_tokens=9))
    driver.step()  # 2 blocks, next token needs a third
    driver.add(make_request("mid", 3, arrival=1, priority=1), make_request("high", 8, arrival=2, priority=0))
    driver.step()  # low 3 blocks, mid and high cannot both fit: high 2, mid 1
    assert driver.scheduler.snapshot().running == ("low", "high", "mid")
    schedule = driver.step()  # high needs a third block: low goes, and mid is still served
    assert schedule.preempted_req_ids == ("low",)
    assert schedule.num_scheduled_tokens == {"high": 1, "mid": 1}


def test_priority_admits_by_priority_then_arrival_then_id(tier: Tier) -> None:
    driver = make_driver(tier, scheduling_policy="priority")
    driver.add(
        make_request("a", 4, arrival=3, priority=1),
        make_request("c", 4, arrival=1, priority=1),
        make_request("b", 4, arrival=1, priority=1),
        make_request("d", 4, arrival=9, priority=0),
    )
    assert list(driver.step().num_scheduled_tokens) == ["d", "b", "c", "a"]


def test_priority_never_preempts_merely_for_a_slot(tier: Tier) -> None:
    driver = make_driver(tier, scheduling_policy="priority", max_num_seqs=1)
    driver.add(make_request("low", 4, priority=5, max_tokens=4))
    driver.step()
    driver.add(make_request("high", 4, arrival=1, priority=0, max_tokens=1))
    driver.run()
    assert driver.num_preemptions == 0
    assert driver.finish_reasons == {"low": "length", "high": "length"}


def test_b13_chunked_prefill_with_caching_off_makes_progress(tier: Tier) -> None:
    driver = make_driver(tier, block_size=16, caching=False, max_num_batched_tokens=32)
    driver.add(make_request("a", 96, max_tokens=1))
    schedules = driver.run()
    assert [schedule.num_scheduled_tokens["a"] for schedule in schedules] == [32, 32, 32]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "num_outputs"), [(1008, 1, 1), (1007, 1, 1), (1000, 24, 9)]
)
def test_b09_a_request_as_large_as_the_pool_is_served_to_the_last_slot(
    tier: Tier, num_prompt_tokens: int, max_tokens: int, num_outputs: int
) -> None:
    driver = make_driver(tier, block_size=16, num_usable_blocks=63, max_model_len=1024)
    driver.add(
        make_request("large", num_prompt_tokens, max_tokens=max_tokens),
        make_request("small", 8, arrival=1, max_tokens=3),
    )
    driver.run()
    assert len(driver.outputs["large"]) == num_outputs
    assert driver.finish_reasons == {"large": "length", "small": "length"}
    assert driver.num_preemptions == 0
    driver.assert_nothing_leaked()


def test_b09_a_prompt_larger_than_the_pool_is_refused_with_both_numbers(tier: Tier) -> None:
    driver = make_driver(tier, block_size=16, num_usable_blocks=63, max_model_len=2048)
    with pytest.raises(ValueError, match=r"1009 tokens needs 64 .* has 63"):
        driver.add(make_request("huge", 1009))
    assert not driver.scheduler.has_unfinished_requests()


def test_the_model_length_ends_a_request_without_computing_the_last_token(tier: Tier) -> None:
    driver = make_driver(tier, max_model_len=12)
    driver.add(make_request("a", 10, max_tokens=50))
    schedules = driver.run()
    assert len(driver.outputs["a"]) == 2
    assert driver.finish_reasons == {"a": "length"}
    assert sum(schedule.total_num_scheduled_tokens for schedule in schedules) == 11


def test_end_of_sequence_stops_unless_it_is_ignored(tier: Tier) -> None:
    def run(**params: Any) -> Driver:
        driver = Driver(tier, make_config(), token_of=lambda request: (7, 8, 2, 9)[request.num_output_tokens])
        driver.add(make_request("a", 5, eos_token_ids=(2, 3), max_tokens=4, **params))
        driver.run()
        return driver

    stopped = run()
    assert (stopped.outputs["a"], stopped.finish_reasons["a"]) == ([7, 8, 2], "stop")
    ignored = run(ignore_eos=True)
    assert (ignored.outputs["a"], ignored.finish_reasons["a"]) == ([7, 8, 2, 9], "length")


def test_a_stop_token_id_stops_with_its_id_as_reason_even_when_eos_is_ignored(tier: Tier) -> None:
    driver = Driver(tier, make_config(), token_of=lambda request: 7 + request.num_output_tokens)
    driver.add(make_request("a", 5, eos_token_ids=(8,), stop_token_ids=[9], ignore_eos=True))
    news = []
    while driver.scheduler.has_unfinished_requests():
        schedule = driver.schedule()
        news = driver.update(schedule, driver.sample(schedule))
    assert driver.outputs["a"] == [7, 8, 9]
    assert (news[0].finish_reason, news[0].stop_reason) == ("stop", 9)


def test_end_of_sequence_comes_before_stop_ids_and_length(tier: Tier) -> None:
    driver = Driver(tier, make_config(), token_of=lambda _: 8)
    driver.add(make_request("a", 5, eos_token_ids=(8,), stop_token_ids=[8], max_tokens=1))
    schedule = driver.schedule()
    (news,) = driver.update(schedule, driver.sample(schedule))
    assert (news.finish_reason, news.stop_reason) == ("stop", None)


def test_tokens_after_the_stop_in_one_step_are_cut(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 5, stop_token_ids=[9]))
    schedule = driver.schedule()
    (news,) = driver.update(schedule, ModelRunnerOutput({"a": [7, 9, 8, 8]}))
    assert news.new_token_ids == (7, 9)
    driver.assert_nothing_leaked()


def test_abort_in_any_state_frees_everything(tier: Tier) -> None:
    driver = make_driver(tier, max_num_seqs=2)
    driver.add(*(make_request(f"r{i}", 6, arrival=i) for i in range(4)))
    driver.step()
    driver.abort("r1", "r2", "unknown", "r1")
    assert driver.scheduler.snapshot().running == ("r0",)
    assert driver.scheduler.snapshot().waiting == ("r3",)
    schedule = driver.step()
    assert schedule.finished_req_ids == ("r1", "r2")
    assert set(schedule.num_scheduled_tokens) == {"r0", "r3"}
    driver.abort("r0", "r3")
    driver.assert_nothing_leaked()


def test_abort_of_a_preempted_request_frees_its_place_in_the_queue(tier: Tier) -> None:
    for policy in ("fcfs", "priority"):
        driver = make_driver(tier, num_usable_blocks=4, caching=False, scheduling_policy=policy)
        driver.add(make_request("a", 8, max_tokens=6), make_request("b", 8, arrival=1, max_tokens=6))
        driver.step()
        assert driver.step().preempted_req_ids == ("b",)
        driver.abort("b")
        assert driver.scheduler.snapshot().waiting == ()
        driver.run()
        driver.assert_nothing_leaked()


def test_b17_abort_after_the_last_step_was_launched_takes_in_no_token(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 5, max_tokens=1))
    schedule = driver.schedule()
    output = driver.sample(schedule)
    driver.abort("a")
    assert driver.update(schedule, output) == []
    assert driver.outputs["a"] == []
    driver.assert_nothing_leaked()


def test_a_failed_step_ends_its_requests_with_error_and_keeps_nothing_they_registered(tier: Tier) -> None:
    driver = make_driver(tier, max_num_seqs=1)
    driver.add(make_request("a", 9), make_request("b", 9, arrival=1, max_tokens=1))
    schedule = driver.schedule()
    (news,) = driver.scheduler.fail_step(schedule, "out of luck")
    assert (news.request_id, news.finish_reason, news.error) == ("a", "error", "out of luck")
    assert driver.scheduler.snapshot().cache.hashes == {}
    driver.scheduler.check_integrity()
    driver.run()
    assert driver.finish_reasons == {"b": "length"}
    driver.assert_nothing_leaked()


def test_a_failed_step_keeps_what_earlier_steps_computed(tier: Tier) -> None:
    driver = make_driver(tier, max_num_batched_tokens=8)
    driver.add(make_request("a", 16))
    driver.step()
    driver.scheduler.fail_step(driver.schedule(), "out of luck")
    assert len(driver.scheduler.snapshot().cache.hashes) == 2


def test_a_request_with_broken_logits_ends_alone_and_leaves_nothing_in_the_cache(tier: Tier) -> None:
    driver = make_driver(tier, max_num_batched_tokens=12)
    driver.add(make_request("bad", 16), make_request("good", 5, arrival=1, max_tokens=2))
    driver.step()
    schedule = driver.schedule()
    sampled = driver.sample(schedule)
    sampled.sampled_token_ids.pop("bad")
    driver.update(schedule, ModelRunnerOutput(sampled.sampled_token_ids, errors={"bad": "NaN in the logits"}))
    assert driver.finish_reasons == {"bad": "error"}
    driver.run()
    assert driver.finish_reasons == {"bad": "error", "good": "length"}
    assert len(driver.scheduler.snapshot().cache.hashes) == 1  # the one full block of "good"


def test_b19_a_duplicate_id_is_refused_and_the_first_request_is_untouched(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 5, max_tokens=2))
    with pytest.raises(ValueError, match="'a' is already in the engine"):
        driver.scheduler.add_request(make_request("a", 7))
    driver.run()
    assert len(driver.outputs["a"]) == 2


def test_running_requests_reach_the_runner_as_deltas(tier: Tier) -> None:
    driver = make_driver(tier)
    request = make_request("a", 4, max_tokens=4)
    driver.add(request)
    first = driver.step()
    assert first.scheduled_new_reqs[0].token_ids == tuple(request.all_token_ids[:4])
    assert first.scheduled_new_reqs[0].block_ids == (1,)
    (delta,) = driver.step().scheduled_running_reqs
    assert delta.new_token_ids == (driver.outputs["a"][0],)
    assert delta.new_block_ids == (2,)
    assert delta.num_computed_tokens == 4
    (delta,) = driver.step().scheduled_running_reqs
    assert delta.new_block_ids == ()


def test_two_equal_prompts_in_one_step_share_blocks_and_the_second_computes_the_rest(tier: Tier) -> None:
    driver = make_driver(tier)
    prompt = list(range(500, 510))
    driver.add(make_request("a", prompt, max_tokens=2), make_request("b", prompt, arrival=1, max_tokens=2))
    assert driver.schedule().num_scheduled_tokens == {"a": 10, "b": 2}
    tables = driver.scheduler.snapshot().cache.block_tables
    assert tables == {"a": (1, 2, 3), "b": (1, 2, 4)}


def test_scripted_outputs_do_not_depend_on_the_schedule(tier: Tier) -> None:
    """The driver's own oracle: one request alone gives the tokens that it gives in a crowd."""
    alone = make_driver(tier)
    alone.add(make_request("a", 9, max_tokens=9))
    alone.run()
    crowd = make_driver(tier, num_usable_blocks=8, max_num_batched_tokens=5)
    crowd.add(*(make_request(name, 9, arrival=i, max_tokens=9) for i, name in enumerate("abc")))
    crowd.run()
    assert crowd.num_preemptions > 0
    assert crowd.outputs["a"] == alone.outputs["a"]
    assert len({scripted_token(make_request(name, 9)) for name in "abc"}) == 3


def test_after_a_failed_step_the_runner_hears_again_what_it_should_forget(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 5, max_tokens=1), make_request("b", 5, arrival=1, max_tokens=3))
    driver.step()  # a ends
    schedule = driver.schedule()
    assert schedule.finished_req_ids == ("a",)
    driver.scheduler.fail_step(schedule, "the runner raised before it looked at the schedule")
    driver.add(make_request("c", 5, arrival=2))
    assert set(driver.schedule().finished_req_ids) == {"a", "b"}


def test_max_num_partial_prefills_caps_the_prompts_in_the_middle_of_their_computation(tier: Tier) -> None:
    driver = make_driver(
        tier, max_num_batched_tokens=13, long_prefill_token_threshold=6, max_num_partial_prefills=1
    )
    driver.add(*(make_request(f"r{i}", 10, arrival=i, max_tokens=3) for i in range(2)))
    driver.add(make_request("short", 3, arrival=2, max_tokens=3))
    assert scheduled(driver) == {"r0": 6}, "r1 would be the second partial prefill, and nobody overtakes it"
    assert driver.scheduler.notes is not None
    assert driver.scheduler.notes.refused == {"r1": "r1 waits: max_num_partial_prefills is 1"}
    # r0 is complete with this step, so r1 may begin; the short prompt is computed whole and counts in no step.
    assert scheduled(driver) == {"r0": 4, "r1": 6, "short": 3}
    assert scheduled(driver) == {"r0": 1, "r1": 4, "short": 1}


def test_a_prompt_that_is_computed_whole_is_no_partial_prefill(tier: Tier) -> None:
    driver = make_driver(tier, max_num_batched_tokens=16, max_num_partial_prefills=1)
    driver.add(make_request("long", 40, max_tokens=2))
    driver.step()
    driver.add(make_request("short", 3, arrival=1, max_tokens=2))
    assert scheduled(driver) == {"long": 16}
    assert scheduled(driver) == {"long": 8, "short": 3}
