"""The heart: a step is three calls. Start reading here.

    schedule = scheduler.schedule()                               who computes how many tokens
    output   = executor.execute(schedule)                         the forward pass and the draws
    news     = scheduler.update_from_output(schedule, output)     tokens taken in, stops checked, blocks freed

(vLLM: `vllm/v1/engine/core.py`.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reference.contracts.config import EngineConfig, SchedulerConfig
from reference.contracts.protocols import Checkpoint, Executor, ModelRunner, Tier
from reference.contracts.request import EngineCoreRequest, Request, RequestStatus, child_request_id
from reference.contracts.schedule import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from reference.contracts.trace import SchedulerNotes, StepTrace, token_kind
from reference.frontend.logger import logger
from reference.frontend.metrics import EngineMetrics

if TYPE_CHECKING:  # the loop itself runs where there is no NumPy
    from reference.frontend.structured_output import GrammarCompiler

OnStep = Callable[[SchedulerOutput, ModelRunnerOutput], None]


class UniProcExecutor:
    """The `Executor` that runs the model in this process (vLLM's name)."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        return self.model_runner.execute(schedule)


@dataclass(frozen=True)
class PlannedStep:
    """What was decided, and when; its trace lacks what came of it."""

    schedule: SchedulerOutput
    started: float
    trace: StepTrace | None


class EngineCore:
    """Scheduler and executor of one tier, and the loop between them.

    Args:
        config: sizes and limits.
        tier: the implementation.
        checkpoint: the weights.
        on_step: called after each forward pass with what was scheduled and what came out.
        draft_checkpoint: the weights of the draft model, where the config has one.
        grammars: compiles `structured_outputs`; without it they are refused.
    """

    def __init__(
        self,
        config: EngineConfig,
        tier: Tier,
        checkpoint: Checkpoint,
        on_step: OnStep | None = None,
        draft_checkpoint: Checkpoint | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.config = config
        self.grammars = grammars
        self.tier_name = tier.name
        # The KV cache first: a pool that does not fit into memory is refused before its blocks are counted out.
        self.executor: Executor = UniProcExecutor(
            tier.make_model_runner(config, checkpoint, draft_checkpoint)
        )
        self.scheduler = tier.make_scheduler(config)
        self.on_step = on_step
        num_drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
        self.metrics = EngineMetrics(
            self.scheduler, config.cache.enable_prefix_caching, num_drafts=num_drafts
        )
        self.traces: list[StepTrace] = []
        self.made_at = time.perf_counter()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises ValueError when it can never run or its id is taken."""
        state = Request.from_engine_core_request(request)
        structured = request.sampling_params.structured_outputs
        if structured is not None:
            if self.grammars is None:
                raise ValueError("This engine core has no compiler for structured_outputs; leave them out.")
            state.grammar = self.grammars.compile(structured)
        self.scheduler.add_request(state)
        self.metrics.request_added(request.request_id)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests and free their blocks; ids that are unknown or already finished are ignored."""
        unfinished = [request_id for request_id in request_ids if request_id in self.scheduler.requests]
        self.scheduler.finish_requests(unfinished, RequestStatus.FINISHED_ABORTED)
        self.metrics.requests_aborted(unfinished)
        if self.traces:
            self.traces[-1].finished.update(dict.fromkeys(unfinished, "abort"))

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Plan by other limits from the next step on; see `Scheduler.reconfigure`."""
        self.scheduler.reconfigure(config)
        self.config = replace(self.config, scheduler=config)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """Run one step; empty when there is nothing to do, or when every request is in mid-prefill and unscored.

        An exception in the forward pass ends the requests of this step with `error`. An interrupt (Ctrl-C) does the
        same and goes on to the caller, who aborts them to get their last outputs; the engine stays usable.
        """
        if not self.has_unfinished_requests():
            return []
        step = self._plan()
        try:
            output = self.executor.execute(step.schedule)
        except Exception as error:
            # One broken step must not take the engine down with it: everybody else is still waiting.
            return self._fail(step, error)
        except BaseException:
            # The blocks of this step are in the prefix cache already, but were never computed.
            self.scheduler.fail_step(step.schedule, "interrupted")
            raise
        return self._take_in(step, output)

    def _plan(self) -> PlannedStep:
        started = time.perf_counter()
        if self.config.trace:
            self.scheduler.notes = SchedulerNotes()
        schedule = self.scheduler.schedule()
        self.metrics.step_scheduled(schedule)
        return PlannedStep(
            schedule, started, self._begin_trace(schedule, started) if self.config.trace else None
        )

    def _fail(self, step: PlannedStep, error: Exception) -> list[EngineCoreOutput]:
        logger.error("Step %d failed; its requests end with an error.", step.schedule.step, exc_info=error)
        news = self.scheduler.fail_step(step.schedule, f"{type(error).__name__}: {error}")
        self._record(step, ModelRunnerOutput(sampled_token_ids={}), news)
        return news

    def _take_in(self, step: PlannedStep, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        try:
            if self.on_step is not None:
                self.on_step(step.schedule, output)
        finally:  # an observer that raises must not leave the step half taken in
            news = self.scheduler.update_from_output(step.schedule, output)
        self._record(step, output, news)
        return news

    def _record(self, step: PlannedStep, output: ModelRunnerOutput, news: list[EngineCoreOutput]) -> None:
        self.metrics.drafts_checked(step.schedule.scheduled_spec_decode_tokens, output.sampled_token_ids)
        self.metrics.step_finished(news)
        if step.trace is None:
            return
        self.traces.append(
            replace(
                step.trace,
                sampled_token_ids=_sampled(output, step.trace.num_scheduled_tokens),
                finished={n.request_id: n.finish_reason for n in news if n.finish_reason is not None},
                seconds=time.perf_counter() - step.started,
            )
        )

    def _begin_trace(self, schedule: SchedulerOutput, started: float) -> StepTrace:
        """What was decided, before the forward pass; what came of it is filled in afterwards."""
        notes, requests = self.scheduler.notes, self.scheduler.requests
        assert notes is not None
        hits = {
            new.request_id: new.num_cached_tokens for new in schedule.scheduled_new_reqs if not new.is_forked
        }
        return StepTrace(
            step=schedule.step,
            token_budget=self.config.scheduler.max_num_batched_tokens,
            num_scheduled_tokens=schedule.num_scheduled_tokens,
            kinds={name: token_kind(requests[name], n) for name, n in schedule.num_scheduled_tokens.items()},
            num_cached_tokens=hits,
            preempted=schedule.preempted_req_ids,
            preemption_reasons=notes.preempted,
            refusal_reasons=notes.refused,
            block_copies=tuple((copy.index, copy.source, copy.target) for copy in schedule.block_copies),
            swap_outs=tuple((swap.device, swap.host) for swap in schedule.swap_outs),
            swap_ins=tuple((swap.device, swap.host) for swap in schedule.swap_ins),
            draft_token_ids=schedule.scheduled_spec_decode_tokens,
            state=self.scheduler.snapshot(),
            sampled_token_ids={},
            finished={},
            started=started - self.made_at,
            seconds=0.0,
        )


def _sampled(output: ModelRunnerOutput, request_ids: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Sampled tokens by sequence, in scheduling order (a runner is free to order its batch otherwise).

    The first tokens of siblings stand behind their parent's, under their own ids.
    """
    sampled = {}
    for request_id in request_ids:
        if request_id in output.sampled_token_ids:
            sampled[request_id] = tuple(output.sampled_token_ids[request_id])
        for index, token_id in enumerate(output.sibling_token_ids.get(request_id, ()), start=1):
            sampled[child_request_id(request_id, index)] = (token_id,)
    return sampled


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
