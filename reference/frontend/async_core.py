"""Asynchronous scheduling: a step is planned while the one before it is still computed.

    the runner's thread   | execute k      | execute k + 1         | execute k + 2
    this thread           | plan k + 1 ... | take in k, plan k + 2 | take in k + 1, plan k + 3

The plan of step k + 1 counts on the tokens of step k without knowing them: a request stands there with a placeholder,
and the runner puts what it has drawn itself in its place. What the plan could not know is made good afterwards:

- a request that ends in step k by its token was planned once in vain, and nobody takes in what came of it;
- a request whose next token decides what there is to plan (`Request.can_run_ahead`) sits out every second step.

Blocks may be freed and handed out while a step in flight still uses them: steps run one after the other, so whoever
gets such a block writes to it later. (vLLM: `AsyncScheduler` and `EngineCore.step_with_batch_queue`.)
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from reference.contracts.config import EngineConfig
from reference.contracts.request import Request
from reference.contracts.schedule import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from reference.frontend.engine_core import EngineCore, PlannedStep


class StepNotRunError(RuntimeError):
    """The step that this one was planned on top of has failed."""


@dataclass(frozen=True)
class _InFlight:
    step: PlannedStep
    requests: dict[str, Request]  # that it was planned for
    output: Future[ModelRunnerOutput]


class AsyncEngineCore(EngineCore):
    """An `EngineCore` that has one step in flight. `step` gives the news of one step, as the other does.

    A step that fails takes along the one that was planned on top of it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model-runner")
        self._in_flight: _InFlight | None = None

    def step(self) -> list[EngineCoreOutput]:
        if not self.has_unfinished_requests():
            return []
        before = self._in_flight or self._launch(None)
        self._in_flight = self._launch(before)
        news = self._finish(before)
        if not self.has_unfinished_requests():
            self._drain()
        return news

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        super().abort_requests(request_ids)
        if not self.has_unfinished_requests():
            self._drain()

    def _launch(self, before: _InFlight | None) -> _InFlight:
        step = self._plan()
        requests = {
            request_id: self.scheduler.requests[request_id]
            for request_id in step.schedule.num_scheduled_tokens
        }
        output = self._worker.submit(self._execute, step.schedule, None if before is None else before.output)
        return _InFlight(step, requests, output)

    def _execute(
        self, schedule: SchedulerOutput, before: Future[ModelRunnerOutput] | None
    ) -> ModelRunnerOutput:
        if before is not None and before.exception() is not None:
            raise StepNotRunError(
                f"step {schedule.step - 1} failed, and step {schedule.step} was planned on top of it"
            )
        return self.executor.execute(schedule)

    def _finish(self, flight: _InFlight) -> list[EngineCoreOutput]:
        step = self._without_strangers(flight)
        try:
            output = flight.output.result()
        except Exception as error:
            return self._fail(step, error) + self._drain()
        except BaseException:
            self.scheduler.fail_step(step.schedule, "interrupted")
            if self._in_flight is not None:
                self.scheduler.fail_step(self._in_flight.step.schedule, "interrupted")
                self._in_flight = None
            raise
        return self._take_in(step, output)

    def _drain(self) -> list[EngineCoreOutput]:
        """Wait for the step in flight, if there is one."""
        flight, self._in_flight = self._in_flight, None
        return [] if flight is None else self._finish(flight)

    def _without_strangers(self, flight: _InFlight) -> PlannedStep:
        """An id may have ended and come back since the step was planned: its tokens are another request's."""
        step, requests = flight.step, self.scheduler.requests
        strangers = {
            name for name, request in flight.requests.items() if requests.get(name, request) is not request
        }
        if not strangers:
            return step
        counts = {name: n for name, n in step.schedule.num_scheduled_tokens.items() if name not in strangers}
        return replace(step, schedule=replace(step.schedule, num_scheduled_tokens=counts))


def make_engine_core(config: EngineConfig, *args: Any, **kwargs: Any) -> EngineCore:
    """The core that `config.scheduler.async_scheduling` asks for; arguments are those of `EngineCore`."""
    core = AsyncEngineCore if config.scheduler.async_scheduling else EngineCore
    return core(config, *args, **kwargs)
