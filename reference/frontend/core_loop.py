"""The engine core as something that runs by itself: commands in, news out, a step whenever there is work.

    receive(block) -> commands        nothing to do: wait for one; else only what has come meanwhile
    core.step()                       see reference/frontend/engine_core.py
    send(news)

The loop knows neither thread nor process: whoever starts it brings `receive` and `send`.
(vLLM: `EngineCoreProc.run_busy_loop`.)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reference.contracts.protocols import Tier
from reference.contracts.request import RequestStatus
from reference.contracts.schedule import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from reference.frontend.async_core import make_engine_core
from reference.frontend.core_messages import (
    AbortRequests,
    AddRequest,
    CallResult,
    Command,
    CoreFailed,
    CoreStats,
    News,
    ResetPrefixCache,
    StepNews,
    StepRecord,
    WatchSteps,
)
from reference.frontend.engine_args import EngineArgs
from reference.frontend.engine_core import EngineCore
from reference.frontend.logger import logger
from reference.frontend.metrics import StatLogger
from reference.frontend.model_loader import load_model
from reference.frontend.structured_output import GrammarCompiler
from reference.frontend.tokenizer import load_tokenizer
from reference.frontend.trace_file import StepEncoder

Receive = Callable[[bool], list[Command]]
Send = Callable[[News], None]


def build_engine_core(args: EngineArgs, tier: Tier) -> tuple[EngineCore, Path]:
    """Load the model and build a core; returns it with the model's path.

    Raises:
        ValueError: the tier cannot run here, the model cannot be found or read, or the options contradict each other.
    """
    model = load_model(args, tier)
    grammars = GrammarCompiler(model.config.model, load_tokenizer(model.path))
    core = make_engine_core(
        model.config, tier, model.checkpoint, draft_checkpoint=model.draft, grammars=grammars
    )
    return core, model.path


class EngineCoreLoop:
    """Runs an engine core. `run` returns after a `Shutdown`, or when the core cannot go on.

    With `EngineConfig.trace`, the trace of a step is sent with the news of the next step, or when the work is done:
    what is aborted until then still belongs to it.
    """

    def __init__(self, core: EngineCore, receive: Receive, send: Send) -> None:
        self.core = core
        self.receive = receive
        self.send = send
        self.is_stopping = False
        self.is_watched = False  # somebody wants the traces
        self._encoder = StepEncoder()
        self.stat_logger = StatLogger(core.metrics)
        self._step_tokens = 0
        core.on_step = self._count_tokens

    def run(self) -> None:
        try:
            while not self.is_stopping:
                self.turn(block=True)
        except Exception as error:
            # A step guards itself (see `EngineCore.step`); what arrives here has broken the scheduler's own state.
            logger.exception("The engine core cannot go on.")
            self.send(CoreFailed(f"{type(error).__name__}: {error}"))

    def turn(self, block: bool) -> None:
        """Take in commands, then do one step if there is work; `block`: wait for a command if there is none."""
        was_idle = not self.core.has_unfinished_requests()
        refused: list[EngineCoreOutput] = []
        commands = self.receive(block and was_idle)
        for command in commands:
            self._handle(command, refused)
        if self.core.has_unfinished_requests():
            if was_idle:
                self.stat_logger.restart()
            outputs = refused + self.core.step()
            self.stat_logger.step()
            self.send(StepNews(outputs, self._stats(), self._take_traces()))
        elif commands and not self.is_stopping:  # an abort has changed the figures
            self.send(StepNews(refused, self._stats(), self._take_traces()))

    def _handle(self, command: Command, refused: list[EngineCoreOutput]) -> None:
        if isinstance(command, AddRequest):
            try:
                self.core.add_request(command.request.unpack())
            except ValueError as error:
                # The API side has checked it; a request that is refused nevertheless ends, and nobody else does.
                name = command.request.request_id
                refused.append(EngineCoreOutput(name, (), finish_reason="error", error=str(error)))
        elif isinstance(command, AbortRequests):
            self.core.abort_requests(command.request_ids)
        elif isinstance(command, ResetPrefixCache):
            was_reset = self.core.scheduler.kv_cache_manager.reset_prefix_cache()
            if was_reset:
                self.core.metrics.prefix_cache.forget_recent()
            self.send(CallResult(command.call_id, was_reset))
        elif isinstance(command, WatchSteps):
            self.is_watched = command.watched
            self._encoder.restart()  # whoever has come just now knows nothing of the steps before
        else:
            self.is_stopping = True

    def _count_tokens(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        self._step_tokens = schedule.total_num_scheduled_tokens

    def _stats(self) -> CoreStats:
        metrics, scheduler = self.core.metrics, self.core.scheduler
        num_running = sum(r.status is RequestStatus.RUNNING for r in scheduler.requests.values())
        step_tokens, self._step_tokens = self._step_tokens, 0
        return CoreStats(
            num_requests_running=num_running,
            num_requests_waiting=len(scheduler.requests) - num_running,
            kv_cache_usage=scheduler.kv_cache_manager.usage,
            prefix_cache_queries=metrics.prefix_cache.queries,
            prefix_cache_hits=metrics.prefix_cache.hits,
            num_preemptions=metrics.num_preemptions,
            prompt_tokens=metrics.prompt_tokens,
            generation_tokens=metrics.generation_tokens,
            num_drafts=metrics.drafts.num_verifications,
            num_draft_tokens=metrics.drafts.num_draft_tokens,
            num_accepted_tokens=metrics.drafts.num_accepted_tokens,
            num_accepted_tokens_per_position=list(metrics.drafts.accepted_per_position),
            step_tokens=step_tokens,
            queue_times=metrics.take_admitted(),
        )

    def _take_traces(self) -> list[StepRecord]:
        """The traces that are complete now. Nothing is kept of a run that may last for months."""
        traces, is_idle = self.core.traces, not self.core.has_unfinished_requests()
        num_complete = len(traces) if is_idle else len(traces) - 1
        complete = traces[: max(num_complete, 0)]
        del traces[: len(complete)]
        return [StepRecord(*self._encoder.encode(trace)) for trace in complete] if self.is_watched else []
