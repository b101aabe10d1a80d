"""What a tier's model runner is told and what it makes of it, step by step, without a model: docs/model-runner.md."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from docs.support.runs import Arrival, make_core, request_of
from reference.contracts.config import cdiv
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import (
    ModelRunnerOutput,
    NewRequestData,
    RunningRequestData,
    SchedulerOutput,
)


@dataclass(frozen=True)
class Prepared:
    """One step."""

    schedule: SchedulerOutput
    step_input: Any  # the tier's StepInput
    rows: Sequence[str]  # who has which row; empty on the reference tier, which keeps none


@cache
def recorded(tier: str) -> Sequence[Prepared]:
    """Four requests of unequal length, one of them preempted, through the tier's scheduler and input batch."""
    core = make_core(tier=tier, blocks=10, budget=16, caching=False)
    batch = importlib.import_module(f"{tier}.input_batch").InputBatch(core.config)
    runner: Any = core.executor
    steps: list[Prepared] = []

    class Recording:
        def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
            batch.update_states(schedule)
            if schedule.num_scheduled_tokens:
                rows = tuple(getattr(batch, "req_ids", ()))
                steps.append(Prepared(schedule, batch.prepare_inputs(schedule), rows))
            return runner.execute(schedule)

    core.executor = Recording()
    arrivals = [Arrival("a", 5, 12), Arrival("b", 6, 3), Arrival("c", 12, 9), Arrival("d", 3, 9, 3)]
    step = 0
    while arrivals or core.has_unfinished_requests():
        for number, arrival in enumerate([a for a in arrivals if a.arrives <= step]):
            core.add_request(request_of(arrival, (step * 10 + number, 0)))
            arrivals.remove(arrival)
        core.step()
        step += 1
    return steps


def seconds_to_prepare(tier: str, num_requests: int, context: int = 500) -> float:
    """Wall time of building one decode step's input, best of five steps in a row."""
    core = make_core(tier=tier, block_size=16, blocks=num_requests * cdiv(context + 64, 16), max_num_seqs=256)
    batch = importlib.import_module(f"{tier}.input_batch").InputBatch(core.config)
    names = [f"r{i}" for i in range(num_requests)]
    per_request = cdiv(context + 64, 16)
    admitted = tuple(
        NewRequestData(
            request_id=name, token_ids=tuple(range(context)), num_prompt_tokens=context,
            num_computed_tokens=context - 1,
            block_ids=tuple(range(1 + i * per_request, 1 + (i + 1) * per_request)), sampling_params=SamplingParams(),
            seed=i,
        )
        for i, name in enumerate(names)
    )  # fmt: skip
    best = float("inf")
    for step in range(6):
        running = tuple(
            RunningRequestData(name, (7,), (), context - 1 + step, None) for name in (names if step else ())
        )
        schedule = SchedulerOutput(
            step=step,
            scheduled_new_reqs=() if step else admitted,
            scheduled_running_reqs=running,
            num_scheduled_tokens=dict.fromkeys(names, 1),
            preempted_req_ids=(),
            finished_req_ids=(),
        )
        started = time.perf_counter()
        batch.update_states(schedule)
        batch.prepare_inputs(schedule)
        if step:
            best = min(best, time.perf_counter() - started)
    return best
