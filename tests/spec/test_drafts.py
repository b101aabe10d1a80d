"""Drafts in the schedule, worked out by hand on both tiers. Block size 4; tokens are scripted, there is no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from reference.contracts.protocols import Tier
from reference.contracts.request import Request
from reference.contracts.schedule import ModelRunnerOutput
from tests.factories import Driver, make_config, make_request, scripted_token


def always_right(request: Request, next_tokens: Sequence[int]) -> list[int]:
    return list(next_tokens)


def always_wrong(request: Request, next_tokens: Sequence[int]) -> list[int]:
    return [token + 1 for token in next_tokens]


def right_until(position: int) -> Any:
    def drafts(request: Request, next_tokens: Sequence[int]) -> list[int]:
        return [token + (i >= position) for i, token in enumerate(next_tokens)]

    return drafts


def make_driver(tier: Tier, drafts_of: Any = always_right, num_drafts: int = 3, **options: Any) -> Driver:
    return Driver(tier, make_config(num_drafts=num_drafts, **options), drafts_of=drafts_of)


def test_a_request_with_drafts_is_scheduled_for_one_token_more(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 6, max_tokens=20))
    assert driver.step().num_scheduled_tokens == {"a": 6}
    schedule = driver.step()
    assert schedule.num_scheduled_tokens == {"a": 4}
    assert schedule.scheduled_spec_decode_tokens == {"a": tuple(driver.outputs["a"][1:4])}
    assert len(driver.outputs["a"]) == 5, "three accepted drafts, and the token behind them"


def test_drafts_are_not_made_while_a_prompt_is_still_computed(tier: Tier) -> None:
    driver = make_driver(tier, max_num_batched_tokens=4)
    driver.add(make_request("a", 9, max_tokens=20))
    counts = [driver.step().num_scheduled_tokens["a"] for _ in range(4)]
    assert counts == [4, 4, 1, 4]


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_rejected_drafts_are_computed_no_more_and_their_blocks_stay(tier: Tier, num_right: int) -> None:
    driver = make_driver(tier, right_until(num_right))
    driver.add(make_request("a", 6, max_tokens=20))
    driver.step()
    driver.step()  # positions 6 to 9
    request = driver.scheduler.requests["a"]
    assert request.num_output_tokens == 1 + num_right + 1
    assert request.num_computed_tokens == request.num_tokens - 1 == 7 + num_right
    assert len(driver.manager.get_block_ids("a")) == 3


def test_rejected_tokens_never_enter_the_prefix_cache(tier: Tier) -> None:
    driver = make_driver(tier, always_wrong)
    driver.add(make_request("a", 6, max_tokens=20))
    driver.step()
    driver.step()  # positions 6 to 9: block 1 would be full if the drafts were right
    assert len(driver.scheduler.snapshot().cache.hashes) == 1
    driver.step()  # token 7 is known and computed now: block 1 is full
    assert len(driver.scheduler.snapshot().cache.hashes) == 2


def test_blocks_that_accepted_drafts_filled_enter_the_prefix_cache_in_the_next_step(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 3, max_tokens=20))
    driver.step()
    driver.step()  # positions 3 to 6, all accepted
    assert len(driver.scheduler.snapshot().cache.hashes) == 1
    driver.step()  # positions 7 to 10
    assert len(driver.scheduler.snapshot().cache.hashes) == 2
    driver.step()  # positions 11 to 14
    assert len(driver.scheduler.snapshot().cache.hashes) == 3


def test_24_drafts_are_part_of_the_allocation(tier: Tier) -> None:
    driver = make_driver(tier, num_drafts=2)
    driver.add(make_request("a", 3, max_tokens=20))
    driver.step()
    assert len(driver.manager.get_block_ids("a")) == 1
    driver.step()  # position 3 and drafts at 4 and 5
    assert len(driver.manager.get_block_ids("a")) == 2


@pytest.mark.parametrize("num_drafts", [1, 3, 10])
def test_b31_drafts_never_reach_the_length_limit(tier: Tier, num_drafts: int) -> None:
    limit = 20
    driver = make_driver(tier, num_drafts=num_drafts, max_model_len=limit)
    driver.add(make_request("a", 9, max_tokens=100))
    while driver.scheduler.has_unfinished_requests():
        request = driver.scheduler.requests["a"]
        num_known = request.num_tokens
        schedule = driver.step()
        drafts = schedule.scheduled_spec_decode_tokens.get("a", ())
        assert len(drafts) <= max(limit - num_known - 1, 0)
    assert len(driver.outputs["a"]) == limit - 9
    assert driver.finish_reasons == {"a": "length"}


def test_no_draft_is_made_that_max_tokens_would_cut(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 6, max_tokens=3))
    driver.step()  # one token; two are left, so one draft and the token behind it
    schedule = driver.step()
    assert schedule.num_scheduled_tokens == {"a": 2}
    assert driver.finish_reasons == {"a": "length"}
    assert len(driver.outputs["a"]) == 3


def test_b33_tokens_behind_a_stop_in_an_accepted_run_are_cut(tier: Tier) -> None:
    driver = make_driver(tier)
    request = make_request("a", 6, max_tokens=20)
    eos = 40_000 + (31 * request.all_token_ids[0] + 7 * 3) % 9_000  # the fourth token
    driver.add(make_request("a", 6, max_tokens=20, eos_token_ids=[eos]))
    driver.step()
    driver.step()
    assert driver.outputs["a"][-1] == eos
    assert len(driver.outputs["a"]) == 4
    assert driver.finish_reasons == {"a": "stop"}
    driver.assert_nothing_leaked()


def test_drafts_beyond_the_budget_are_cut_and_not_kept(tier: Tier) -> None:
    driver = make_driver(tier, max_num_batched_tokens=6)
    driver.add(make_request("a", 3, max_tokens=20), make_request("b", 3, arrival=1, max_tokens=20))
    driver.step()
    schedule = driver.step()
    assert schedule.num_scheduled_tokens == {"a": 4, "b": 2}
    assert {name: len(drafts) for name, drafts in schedule.scheduled_spec_decode_tokens.items()} == {
        "a": 3,
        "b": 1,
    }
    assert len(driver.outputs["b"]) == 3


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_loses_its_drafts(tier: Tier, mode: str) -> None:
    driver = make_driver(
        tier, always_wrong, num_usable_blocks=5, num_host_blocks=10, preemption_mode=mode, caching=False
    )
    driver.add(make_request("a", 7, max_tokens=9), make_request("b", 7, arrival=1, max_tokens=9))
    victims: list[str] = []
    while not victims:
        victims += driver.step().preempted_req_ids
    assert victims == ["b"]
    assert driver.scheduler.requests["b"].spec_token_ids == []
    driver.run()
    assert [len(tokens) for tokens in driver.outputs.values()] == [9, 9]
    driver.assert_nothing_leaked()


def test_a_step_without_a_proposal_leaves_no_drafts(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 6, max_tokens=20))
    driver.step()
    schedule = driver.schedule()
    assert schedule.scheduled_spec_decode_tokens
    driver.update(schedule, replace(driver.sample(schedule), draft_token_ids={}))
    schedule = driver.schedule()
    assert schedule.scheduled_spec_decode_tokens == {}
    assert schedule.num_scheduled_tokens == {"a": 1}


def test_49_an_empty_answer_to_drafts_is_computed_again(tier: Tier) -> None:
    driver = make_driver(tier)
    driver.add(make_request("a", 6, max_tokens=20))
    driver.step()
    schedule = driver.schedule()
    assert driver.update(schedule, ModelRunnerOutput({})) == []
    request = driver.scheduler.requests["a"]
    assert request.num_computed_tokens == request.num_tokens - 1 == 6
    driver.run()
    assert len(driver.outputs["a"]) == 20


@pytest.mark.parametrize("drafts_of", [always_right, always_wrong, right_until(1), right_until(2)])
@pytest.mark.parametrize("num_drafts", [1, 3, 10])
def test_outputs_are_those_without_speculation(tier: Tier, drafts_of: Any, num_drafts: int) -> None:
    plain = Driver(tier, make_config())
    requests = [("a", 5, 1), ("b", 13, 3), ("c", 22, 1)]
    drivers = [
        make_driver(tier, drafts_of, num_drafts, num_usable_blocks=14, num_host_blocks=20, **options)
        for options in ({}, {"preemption_mode": "swap"}, {"max_num_batched_tokens": 7}, {"caching": False})
    ]
    for driver in (plain, *drivers):
        for i, (name, prompt, n) in enumerate(requests):
            driver.add(make_request(name, prompt, arrival=i, n=n, max_tokens=17))
        driver.run()
        driver.assert_nothing_leaked()
        assert driver.outputs == plain.outputs
    request = make_request("a", 5)
    for token in plain.outputs["a"]:
        assert token == scripted_token(request)
        request.all_token_ids.append(token)
