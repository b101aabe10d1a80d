"""A step is three calls; what breaks in one step ends that step's requests and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, cast

import pytest

from reference.contracts.protocols import Tier
from reference.contracts.request import EngineCoreRequest
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from reference.frontend.engine_core import EngineCore, InprocClient, OnStep
from tests.scripted import NO_WEIGHTS, ScriptedRunner, ScriptedTier, make_scripted_config


def make_core(tier: Tier, on_step: OnStep | None = None, **options: Any) -> tuple[EngineCore, ScriptedRunner]:
    runner_options = {name: options.pop(name) for name in ("script", "raise_at", "nan_at") if name in options}
    scripted = ScriptedTier(tier, **runner_options)
    core = EngineCore(make_scripted_config(**options), scripted, NO_WEIGHTS, on_step)
    assert scripted.runner is not None
    return core, scripted.runner


def request(
    request_id: str,
    prompt: int | Iterable[int],
    *,
    arrival: int = 0,
    cache_salt: str | None = None,
    **params: Any,
) -> EngineCoreRequest:
    """`prompt` as a number makes that many tokens that no other id shares."""
    if isinstance(prompt, int):
        prompt = range(300 + ord(request_id[0]), 300 + ord(request_id[0]) + prompt)
    return EngineCoreRequest(
        request_id, tuple(prompt), SamplingParams(**params), 0, (arrival, 0), cache_salt=cache_salt
    )


def run(core: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    news: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(1000):
        if not core.has_unfinished_requests():
            return news
        for item in core.step():
            news.setdefault(item.request_id, []).append(item)
        core.scheduler.check_integrity()
    raise AssertionError("the engine does not come to an end")


def tokens(news: list[EngineCoreOutput]) -> list[int]:
    return [token_id for item in news for token_id in item.new_token_ids]


def test_a_step_is_schedule_then_execute_then_update() -> None:
    calls: list[Any] = []
    schedule = SchedulerOutput(0, (), (), {}, (), ())
    output, result = ModelRunnerOutput({}), [EngineCoreOutput("a", ())]

    class Recorder:
        """Scheduler, runner and tier in one."""

        name = "recorder"

        def __getattr__(self, name: str) -> Any:
            values = {"schedule": schedule, "execute": output, "update_from_output": result}
            values |= {"make_scheduler": self, "make_model_runner": self, "has_unfinished_requests": True}

            def call(*arguments: Any) -> Any:
                calls.append((name, *arguments))
                return values[name]

            return call

    core = EngineCore(make_scripted_config(), cast(Tier, Recorder()), NO_WEIGHTS)
    calls.clear()
    assert core.step() is result
    assert calls == [
        ("has_unfinished_requests",),
        ("schedule",),
        ("execute", schedule),
        ("update_from_output", schedule, output),
    ]


def test_requests_run_to_their_end_and_a_step_without_any_does_nothing(tier: Tier) -> None:
    core, runner = make_core(tier)
    assert core.step() == []
    core.add_request(request("a", 9, max_tokens=3))
    core.add_request(request("b", 2, max_tokens=5))
    news = run(core)
    assert tokens(news["a"]) == runner.tokens("a", 3)
    assert tokens(news["b"]) == runner.tokens("b", 5)
    assert [items[-1].finish_reason for items in news.values()] == ["length", "length"]
    num_steps = len(runner.schedules)
    assert core.step() == []
    assert len(runner.schedules) == num_steps == 5


def test_the_schedulers_refusals_are_value_errors(tier: Tier) -> None:
    core, _ = make_core(tier, num_usable_blocks=3, block_size=4)
    core.add_request(request("a", 4))
    with pytest.raises(ValueError, match="'a' is already"):
        core.add_request(request("a", 4))
    with pytest.raises(ValueError, match="13 tokens needs 4 KV cache blocks"):
        core.add_request(request("b", 13))
    assert list(run(core)) == ["a"]


def test_an_exception_in_a_step_ends_its_requests_and_never_the_engine(
    tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    core, runner = make_core(tier, raise_at={1: RuntimeError("out of luck")}, max_num_seqs=2)
    for request_id in "abc":
        core.add_request(request(request_id, 9, max_tokens=4))
    with caplog.at_level(logging.ERROR, logger="twinfer"):
        news = run(core)
    for request_id in "ab":  # c was waiting for a slot
        assert news[request_id][-1].finish_reason == "error"
        assert news[request_id][-1].error == "RuntimeError: out of luck"
        assert tokens(news[request_id]) == runner.tokens(request_id, 1)
    assert tokens(news["c"]) == runner.tokens("c", 4)
    assert "Step 1 failed" in caplog.text
    assert "out of luck" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_blocks_of_a_step_that_did_not_finish_are_never_found_again(tier: Tier, error: BaseException) -> None:
    """The scripted runner asserts that every block it reads was computed."""
    core, runner = make_core(tier, raise_at={0: error}, block_size=4)
    core.add_request(request("a", range(300, 309), max_tokens=2))
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            core.step()
    else:
        core.step()
    core.scheduler.check_integrity()
    assert not core.has_unfinished_requests()
    assert core.scheduler.snapshot().cache.hashes == {}
    core.add_request(request("b", range(300, 309), max_tokens=2))
    news = run(core)
    assert tokens(news["b"]) == runner.tokens("b", 2)
    assert news["b"][-1].num_cached_tokens == 0


def test_broken_logits_end_one_request_and_leave_the_others_alone(tier: Tier) -> None:
    core, runner = make_core(tier, nan_at={"a": 2}, block_size=4)
    core.add_request(request("a", 9, max_tokens=9))
    core.add_request(request("b", 9, max_tokens=9))
    news = run(core)
    assert (news["a"][-1].finish_reason, news["a"][-1].error) == ("error", "logits are not a number")
    assert tokens(news["a"]) == runner.tokens("a", 2)
    assert tokens(news["b"]) == runner.tokens("b", 9)
    core.add_request(request("c", request("a", 9).prompt_token_ids, max_tokens=1))
    assert run(core)["c"][-1].num_cached_tokens == 0, "nothing of the broken request stays cached"


def test_b17_a_request_aborted_while_its_last_step_runs_gets_no_token(tier: Tier) -> None:
    core, _ = make_core(tier)
    execute = core.executor.execute

    def execute_and_abort(schedule: SchedulerOutput) -> ModelRunnerOutput:
        output = execute(schedule)
        assert output.sampled_token_ids
        core.abort_requests(["a"])
        return output

    core.executor.execute = execute_and_abort  # type: ignore[method-assign]
    core.add_request(request("a", 9, max_tokens=1))
    assert core.step() == []
    assert not core.has_unfinished_requests()
    core.scheduler.check_integrity()
    assert core.scheduler.snapshot().cache.block_tables == {}


def test_aborting_ends_running_and_waiting_requests_and_ignores_others(tier: Tier) -> None:
    core, runner = make_core(tier, max_num_seqs=1)
    for request_id in "abc":
        core.add_request(request(request_id, 5, max_tokens=3))
    core.step()
    core.abort_requests(["a", "c", "unknown"])
    core.scheduler.check_integrity()
    news = run(core)
    assert list(news) == ["b"]
    assert tokens(news["b"]) == runner.tokens("b", 3)
    core.abort_requests(["b"])


def test_an_id_may_be_used_again_when_its_request_has_ended(tier: Tier) -> None:
    core, runner = make_core(tier)
    for prompt in (3, 7):
        core.add_request(request("a", prompt, max_tokens=2))
        assert tokens(run(core)["a"]) == runner.tokens("a", 2)


def test_a_trace_holds_one_record_a_step_taken_before_the_forward_pass(tier: Tier) -> None:
    core, runner = make_core(tier, trace=True, block_size=4, raise_at={4: RuntimeError("broken")})
    core.add_request(request("a", range(300, 309), max_tokens=3))
    run(core)
    core.add_request(request("b", range(300, 309), max_tokens=3))
    run(core)
    assert [trace.step for trace in core.traces] == [0, 1, 2, 3, 4]
    first, second, third, fourth, broken = core.traces
    assert first.num_scheduled_tokens == {"a": 9}
    assert first.state.num_computed_tokens == {"a": 9}
    assert first.state.cache.block_tables == {"a": (1, 2, 3)}
    assert first.sampled_token_ids == {"a": (runner.token("a", 0),)}
    assert (first.finished, second.finished, third.finished) == ({}, {}, {"a": "length"})
    assert third.state.cache.block_tables == {"a": (1, 2, 3)}, (
        "the blocks of a request that ends in this step"
    )
    assert fourth.num_cached_tokens == {"b": 8}
    assert fourth.state.cache.block_tables["b"][:2] == (1, 2)
    assert (broken.sampled_token_ids, broken.finished) == ({}, {"b": "error"})


def test_without_trace_nothing_is_recorded(tier: Tier) -> None:
    core, _ = make_core(tier)
    core.add_request(request("a", 9, max_tokens=3))
    run(core)
    assert core.traces == []


def test_the_observer_sees_every_schedule_with_its_output(tier: Tier) -> None:
    seen: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
    core, runner = make_core(tier, lambda schedule, output: seen.append((schedule, output)))
    core.add_request(request("a", 9, max_tokens=3))
    run(core)
    assert [schedule for schedule, _ in seen] == runner.schedules
    assert [output.sampled_token_ids["a"] for _, output in seen] == [
        [token] for token in runner.tokens("a", 3)
    ]


def test_an_observer_that_raises_does_not_lose_the_step(tier: Tier) -> None:
    def raise_once(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        if schedule.step == 1:
            raise LookupError("the observer's own mistake")

    core, runner = make_core(tier, raise_once)
    core.add_request(request("a", 9, max_tokens=4))
    core.step()
    with pytest.raises(LookupError):
        core.step()
    core.scheduler.check_integrity()
    assert tokens(run(core)["a"]) == runner.tokens("a", 4)[2:]


def test_a_client_in_process_reaches_the_core_itself(tier: Tier) -> None:
    core, runner = make_core(tier)
    client = InprocClient(core)
    client.add_request(request("a", 9, max_tokens=2))
    client.add_request(request("b", 9, max_tokens=2))
    client.abort_requests(["b"])
    assert client.has_unfinished_requests()
    (item,) = client.get_output()
    assert item == EngineCoreOutput("a", (runner.token("a", 0),))
    client.get_output()
    assert not client.has_unfinished_requests()
    assert client.get_output() == []
