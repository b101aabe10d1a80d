"""Random runs of the whole engine: both tiers record the same trace, and a file gives it back unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from reference.contracts.config import EngineConfig
from reference.contracts.request import EngineCoreRequest
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.trace import StepTrace
from reference.frontend.chrome_trace import chrome_events
from reference.frontend.engine_core import EngineCore
from reference.frontend.tiers import load_tier
from reference.frontend.trace_file import read_trace, write_trace
from reference.frontend.trace_run import summarise
from tests.property.test_scheduler_machine import configs
from tests.scripted import NO_WEIGHTS, ScriptedTier


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, EngineCoreRequest]]:
    """(step, request), over few tokens so that prefixes are shared. Ids come again, and need escaping in JSON."""
    items = []
    for number in range(draw(st.integers(1, 8))):
        prompt = [draw(st.integers(300, 301))] * 4 + [7] * draw(st.integers(1, 25))
        request = EngineCoreRequest(
            request_id=draw(st.sampled_from(["r", '"', "é", "0", "x"])) + str(number % 5),
            prompt_token_ids=tuple(prompt),
            sampling_params=SamplingParams(max_tokens=draw(st.integers(1, 30))),
            seed=0,
            arrival=(number, 0),
            priority=draw(st.integers(0, 2)),
        )
        items.append((draw(st.integers(0, 30)), request))
    return sorted(items, key=lambda item: item[0])


def record(
    tier_name: str,
    config: EngineConfig,
    requests: list[tuple[int, EngineCoreRequest]],
    aborts: dict[int, str],
    failing: set[int],
) -> list[StepTrace]:
    raise_at = {step: RuntimeError("planned failure") for step in failing}
    tier = ScriptedTier(load_tier(tier_name), raise_at=raise_at)
    core = EngineCore(replace(config, trace=True), tier, NO_WEIGHTS)
    waiting = list(requests)
    for step in range(2000):
        while waiting and waiting[0][0] <= step:
            request = waiting.pop(0)[1]
            try:
                core.add_request(request)
            except ValueError:  # too long for the pool, or its id is taken: refused by both tiers alike
                continue
        core.abort_requests([aborts[step]] if step in aborts else [])
        core.step()
        if not waiting and not core.has_unfinished_requests():
            return core.traces
    raise AssertionError("the engine does not come to an end")


SETTINGS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@SETTINGS
@given(
    config=configs(),
    requests=arrivals(),
    aborts=st.dictionaries(st.integers(1, 40), st.sampled_from(["r0", "r1", '"2', "é3"]), max_size=3),
    failing=st.sets(st.integers(0, 60), max_size=2),
)
def test_both_tiers_record_one_trace_and_a_file_gives_it_back(
    config: EngineConfig,
    requests: list[tuple[int, EngineCoreRequest]],
    aborts: dict[int, str],
    failing: set[int],
    tmp_path: Path,
) -> None:
    first, second = (record(name, config, requests, aborts, failing) for name in ("reference", "fast"))
    timeless = [[replace(trace, started=0.0, seconds=0.0) for trace in traces] for traces in (first, second)]
    assert timeless[0] == timeless[1]
    # Two dicts in different orders are equal, and two schedules in different orders are not.
    assert [repr(trace) for trace in timeless[0]] == [repr(trace) for trace in timeless[1]]
    write_trace(first, tmp_path / "run.json")
    again = read_trace(tmp_path / "run.json")
    assert again == first
    assert [repr(trace) for trace in again] == [repr(trace) for trace in first]
    assert chrome_events(again) == chrome_events(first)
    assert summarise(first).num_usable_blocks in (0, config.cache.num_usable_blocks)
