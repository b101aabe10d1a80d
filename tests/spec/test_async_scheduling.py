"""A step is planned while the one before is computed: the tokens stay, and so does the schedule but for the offset."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from reference.contracts.config import EngineConfig, SpeculativeConfig
from reference.contracts.protocols import Tier
from reference.contracts.schedule import (
    PLACEHOLDER_TOKEN_ID,
    EngineCoreOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from reference.frontend.async_core import AsyncEngineCore, make_engine_core
from reference.frontend.engine_core import EngineCore
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.workload import Workload, WorkloadRequest, run_workload
from tests.scripted import EOS, NO_WEIGHTS, ScriptedRunner, ScriptedTier, byte_tokenizer, make_scripted_config
from tests.spec.test_engine_core import request, tokens


def make_core(tier: Tier, is_async: bool = True, **options: Any) -> tuple[EngineCore, ScriptedRunner]:
    runner_options = {name: options.pop(name) for name in ("script", "raise_at", "nan_at") if name in options}
    scripted = ScriptedTier(tier, **runner_options)
    config = make_scripted_config(**options)
    config = replace(config, scheduler=replace(config.scheduler, async_scheduling=is_async))
    core = make_engine_core(config, scripted, NO_WEIGHTS)
    assert isinstance(core, AsyncEngineCore) is is_async
    assert scripted.runner is not None
    return core, scripted.runner


def run(core: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    news: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(1000):
        if not core.has_unfinished_requests():
            return news
        for item in core.step():
            news.setdefault(item.request_id, []).append(item)
        core.scheduler.check_integrity()
    raise AssertionError("the engine does not come to an end")


def counts(schedules: list[SchedulerOutput]) -> list[dict[str, int]]:
    return [schedule.num_scheduled_tokens for schedule in schedules if schedule.num_scheduled_tokens]


def both(
    tier: Tier, *requests: Any, **options: Any
) -> list[tuple[dict[str, list[int]], list[dict[str, int]]]]:
    """Tokens by request and tokens a step: of the synchronous run, and of the asynchronous one."""
    results = []
    for is_async in (False, True):
        core, runner = make_core(tier, is_async, **options)
        for each in requests:
            core.add_request(each)
        news = run(core)
        results.append(({name: tokens(items) for name, items in news.items()}, counts(runner.schedules)))
    return results


def test_requests_that_end_by_length_have_the_very_schedule_of_the_synchronous_run(tier: Tier) -> None:
    requests = [request("a", 9, max_tokens=4), request("b", 21, max_tokens=7), request("c", 3, max_tokens=1)]
    synchronous, asynchronous = both(tier, *requests, max_num_batched_tokens=16, num_usable_blocks=40)
    assert asynchronous == synchronous


def test_a_request_that_ends_by_its_token_is_planned_once_more_in_vain(tier: Tier) -> None:
    requests = [request("a", 5, max_tokens=9, stop_token_ids=[EOS]), request("b", 5, max_tokens=6)]
    script = {"a": [1000, 1001, EOS]}
    synchronous, asynchronous = both(tier, *requests, script=script, num_usable_blocks=40)
    assert asynchronous[0] == synchronous[0] == {"a": [1000, 1001, EOS], "b": synchronous[0]["b"]}
    steps = [step.get("a", 0) for step in asynchronous[1]]
    assert steps == [5, 1, 1, 1, 0, 0]  # the fourth was planned before the end was known
    assert [step.get("a", 0) for step in synchronous[1]] == [5, 1, 1, 0, 0, 0]
    assert [step["b"] for step in asynchronous[1]] == [step["b"] for step in synchronous[1]]


def test_the_next_step_is_planned_before_the_last_one_is_computed(tier: Tier) -> None:
    core, runner = make_core(tier)
    core.add_request(request("a", 5, max_tokens=3))
    may_run, planned = threading.Event(), threading.Event()
    schedule, execute = core.scheduler.schedule, runner.execute
    num_planned = 0

    def note_plan() -> SchedulerOutput:
        nonlocal num_planned
        num_planned += 1
        output = schedule()
        if num_planned == 2:
            planned.set()
            may_run.set()
        return output

    def wait_first(output: SchedulerOutput) -> Any:
        assert may_run.wait(timeout=60), "the second step was not planned while the first one ran"
        return execute(output)

    core.scheduler.schedule = note_plan  # type: ignore[method-assign]
    runner.execute = wait_first  # type: ignore[method-assign]
    assert tokens(core.step()) == [runner.token("a", 0)]
    assert planned.is_set()
    deltas = [delta for output in runner.schedules for delta in output.scheduled_running_reqs]
    assert all(delta.new_token_ids == (PLACEHOLDER_TOKEN_ID,) for delta in deltas)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_tokens_are_the_same_when_blocks_run_short(tier: Tier, mode: str) -> None:
    requests = [
        request(name, 6, arrival=i, max_tokens=20, stop_token_ids=[EOS]) for i, name in enumerate("abcd")
    ]
    script = {"b": [1000] * 7 + [EOS], "c": [1001] * 12 + [EOS]}
    options = {"num_usable_blocks": 12, "block_size": 4, "preemption_mode": mode, "num_host_blocks": 8}
    synchronous, asynchronous = both(tier, *requests, script=script, **options)
    assert asynchronous[0] == synchronous[0]


def test_a_prompt_that_siblings_begin_behind_sits_out_the_step_planned_on_top_of_it(tier: Tier) -> None:
    core, _ = make_core(tier, block_size=4)
    core.add_request(request("a", 6, n=2, max_tokens=5))
    first, second = core.scheduler.schedule(), core.scheduler.schedule()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 6}, {})
    output = ModelRunnerOutput({"a": [1000]}, sibling_token_ids={"a": [1001]})
    core.scheduler.update_from_output(first, output)
    third = core.scheduler.schedule()
    assert third.num_scheduled_tokens == {"a": 1, "1_a": 1}
    assert third.scheduled_running_reqs[0].new_token_ids == (1000,)
    assert len(third.block_copies) == 1


@pytest.mark.parametrize("end", [{"max_tokens": 4}, {"max_tokens": 9, "stop_token_ids": [EOS]}])
def test_blocks_are_found_in_the_cache_as_after_a_synchronous_run(tier: Tier, end: dict[str, Any]) -> None:
    prompt = range(40, 49)
    hits = []
    for is_async in (False, True):
        core, runner = make_core(tier, is_async, block_size=4, script={"a": [1000, 1001, 1002, EOS]})
        core.add_request(request("a", prompt, **end))
        (news,) = run(core).values()
        core.add_request(request("b", [*prompt, *tokens(news), 50], arrival=1, max_tokens=1))
        run(core)
        hits.append([new.num_cached_tokens for s in runner.schedules for new in s.scheduled_new_reqs])
    assert hits[0] == hits[1] == [0, 12]


def test_an_id_that_ends_and_comes_back_does_not_get_the_tokens_of_the_one_before(tier: Tier) -> None:
    core, runner = make_core(tier)
    core.add_request(request("a", 5, max_tokens=9))
    core.add_request(request("b", 7, arrival=1, max_tokens=9))
    core.step()
    core.abort_requests(["a"])
    core.add_request(request("a", 3, arrival=2, max_tokens=4))
    assert tokens(run(core)["a"]) == runner.tokens("a", 4)


def test_an_abort_of_everybody_leaves_no_step_in_flight_and_no_block_held(tier: Tier) -> None:
    core, runner = make_core(tier)
    core.add_request(request("a", 5, max_tokens=9))
    core.step()
    core.abort_requests(["a"])
    assert not core.has_unfinished_requests()
    assert core.step() == []
    assert len(runner.schedules) == 2  # both have run
    assert core.scheduler.kv_cache_manager.usage == 0


def test_a_step_that_fails_takes_along_the_one_planned_on_top_of_it_and_nobody_else(tier: Tier) -> None:
    core, runner = make_core(tier, raise_at={1: RuntimeError("out of memory")}, max_num_seqs=2)
    for i, name in enumerate("abc"):
        core.add_request(request(name, 5, arrival=i, max_tokens=4))
    news = run(core)
    assert [items[-1].finish_reason for items in news.values()] == ["error", "error", "length"]
    assert "out of memory" in (news["a"][-1].error or "")
    steps = [schedule.step for schedule in runner.schedules if schedule.num_scheduled_tokens]
    assert steps == [0, 1, 3, 4, 5, 6]  # the third never ran
    assert tokens(news["c"]) == runner.tokens("c", 4)


def test_nothing_of_a_failed_step_is_found_in_the_cache(tier: Tier) -> None:
    core, runner = make_core(tier, raise_at={0: RuntimeError("broken")}, block_size=4)
    prompt = range(40, 52)
    core.add_request(request("a", prompt, max_tokens=4))
    run(core)
    core.add_request(request("b", prompt, arrival=1, max_tokens=1))
    run(core)
    assert [new.num_cached_tokens for s in runner.schedules for new in s.scheduled_new_reqs] == [0, 0]


def test_a_request_with_broken_logits_ends_and_the_others_go_on(tier: Tier) -> None:
    core, runner = make_core(tier, nan_at={"a": 2})
    core.add_request(request("a", 5, max_tokens=9))
    core.add_request(request("b", 5, arrival=1, max_tokens=6))
    news = run(core)
    assert [news[name][-1].finish_reason for name in "ab"] == ["error", "length"]
    assert tokens(news["a"]) == runner.tokens("a", 2)
    assert tokens(news["b"]) == runner.tokens("b", 6)


def test_an_interrupt_ends_both_steps_and_leaves_the_engine_usable(tier: Tier) -> None:
    core, runner = make_core(tier, raise_at={1: KeyboardInterrupt()})
    core.add_request(request("a", 5, max_tokens=9))
    core.step()
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert not core.has_unfinished_requests()
    core.add_request(request("b", 5, arrival=1, max_tokens=2))
    assert tokens(run(core)["b"]) == runner.tokens("b", 2)


def test_traces_come_one_a_step_and_in_order(tier: Tier) -> None:
    core, _ = make_core(tier, trace=True)
    core.add_request(request("a", 5, max_tokens=4))
    run(core)
    assert [trace.step for trace in core.traces] == list(range(len(core.traces)))
    assert [trace.kinds.get("a") for trace in core.traces] == ["prefill", "decode", "decode", "decode", None]


def test_stop_strings_and_texts_are_those_of_the_synchronous_engine(tier: Tier) -> None:
    answers = []
    for is_async in (False, True):
        config: EngineConfig = make_scripted_config()
        config = replace(config, scheduler=replace(config.scheduler, async_scheduling=is_async))
        engine = LLMEngine(
            config, ScriptedTier(tier, script={"r0": [70, 71, 72, 73]}), NO_WEIGHTS, byte_tokenizer()
        )
        stop = byte_tokenizer().decode([71, 72])
        params = request("x", 1, max_tokens=9, stop=stop).sampling_params
        answers.append(
            run_workload(engine, Workload((WorkloadRequest("r0", prompt_token_ids=(5, 6), params=params),)))
        )
    first, second = (answer["r0"].outputs[0] for answer in answers)
    assert (first.text, first.token_ids, first.stop_reason) == (
        second.text,
        second.token_ids,
        second.stop_reason,
    )
    assert first.finish_reason == "stop"


def test_speculation_is_refused() -> None:
    config = make_scripted_config()
    with pytest.raises(ValueError, match="async_scheduling"):
        replace(
            config,
            scheduler=replace(config.scheduler, async_scheduling=True),
            speculative=SpeculativeConfig("ngram", 2),
        )
