"""The heart: a step is three calls. Start reading here.

    schedule = scheduler.schedule()                               who computes how many tokens
    output   = executor.execute(schedule)                         the forward pass and the draws
    news     = scheduler.update_from_output(schedule, output)     tokens taken in, stops checked, blocks freed

(vLLM: `vllm/v1/engine/core.py`.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from reference.contracts.config import EngineConfig
from reference.contracts.protocols import Checkpoint, ModelRunner, Tier
from reference.contracts.request import EngineCoreRequest, Request, RequestStatus, child_request_id
from reference.contracts.schedule import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from reference.contracts.trace import SchedulerSnapshot, StepTrace
from reference.frontend.logger import logger

OnStep = Callable[[SchedulerOutput, ModelRunnerOutput], None]


class UniProcExecutor:
    """The `Executor` that runs the model in this process (vLLM's name)."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        return self.model_runner.execute(schedule)


class EngineCore:
    """Scheduler and executor of one tier, and the loop between them.

    Args:
        config: sizes and limits.
        tier: the implementation.
        checkpoint: the weights.
        on_step: called after each forward pass with what was scheduled and what came out.
    """

    def __init__(
        self, config: EngineConfig, tier: Tier, checkpoint: Checkpoint, on_step: OnStep | None = None
    ) -> None:
        self.config = config
        self.tier_name = tier.name
        # The KV cache first: a pool that does not fit into memory is refused before its blocks are counted out.
        self.executor = UniProcExecutor(tier.make_model_runner(config, checkpoint))
        self.scheduler = tier.make_scheduler(config)
        self.on_step = on_step
        self.traces: list[StepTrace] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises ValueError when it can never run or its id is taken."""
        self.scheduler.add_request(Request.from_engine_core_request(request))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks; ids that are unknown or already finished are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """Run one step; empty when there is nothing to do, or when every request is in mid-prefill.

        An exception in the forward pass ends the requests of this step with `error`. An interrupt (Ctrl-C) does the
        same and goes on to the caller, who aborts them to get their last outputs; the engine stays usable.
        """
        if not self.has_unfinished_requests():
            return []
        started = time.perf_counter()
        schedule = self.scheduler.schedule()
        state = self.scheduler.snapshot() if self.config.trace else None
        try:
            output = self.executor.execute(schedule)
        except Exception as error:
            # One broken step must not take the engine down with it: everybody else is still waiting.
            logger.exception("Step %d failed; its requests end with an error.", schedule.step)
            output = ModelRunnerOutput(sampled_token_ids={})
            news = self.scheduler.fail_step(schedule, f"{type(error).__name__}: {error}")
        except BaseException:
            # The blocks of this step are in the prefix cache already, but were never computed.
            self.scheduler.fail_step(schedule, "interrupted")
            raise
        else:
            try:
                if self.on_step is not None:
                    self.on_step(schedule, output)
            finally:  # an observer that raises must not leave the step half taken in
                news = self.scheduler.update_from_output(schedule, output)
        if state is not None:
            self._record(schedule, state, output, news, time.perf_counter() - started)
        return news

    def _record(
        self,
        schedule: SchedulerOutput,
        state: SchedulerSnapshot,
        output: ModelRunnerOutput,
        news: list[EngineCoreOutput],
        seconds: float,
    ) -> None:
        self.traces.append(
            StepTrace(
                step=schedule.step,
                num_scheduled_tokens=schedule.num_scheduled_tokens,
                num_cached_tokens={
                    new.request_id: new.num_computed_tokens for new in schedule.scheduled_new_reqs
                },
                preempted=schedule.preempted_req_ids,
                state=state,
                sampled_token_ids={name: tuple(ids) for name, ids in _sampled(output)},
                finished={
                    item.request_id: item.finish_reason for item in news if item.finish_reason is not None
                },
                seconds=seconds,
            )
        )


def _sampled(output: ModelRunnerOutput) -> Iterator[tuple[str, list[int]]]:
    """Sampled tokens by request, the first tokens of siblings under their own ids."""
    yield from output.sampled_token_ids.items()
    for request_id, token_ids in output.sibling_token_ids.items():
        for index, token_id in enumerate(token_ids, start=1):
            yield child_request_id(request_id, index), [token_id]


class InprocClient:
    """The `EngineCoreClient` for a core in this process: a call is a call (vLLM's name)."""

    def __init__(self, engine_core: EngineCore) -> None:
        self.engine_core = engine_core

    def add_request(self, request: EngineCoreRequest) -> None:
        self.engine_core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.engine_core.abort_requests(request_ids)

    def get_output(self) -> list[EngineCoreOutput]:
        return self.engine_core.step()

    def has_unfinished_requests(self) -> bool:
        return self.engine_core.has_unfinished_requests()
