"""Playing a workload, and what is kept of it: the trace, and what a trace alone does not hold."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from app.scripted import SCRIPTED_MODEL, ScriptedTier, WordTokenizer
from reference.contracts.config import SchedulerConfig
from reference.contracts.protocols import Checkpoint
from reference.contracts.request import child_request_id
from reference.contracts.trace import StepTrace
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRun

SCRIPTED = "scripted"
NUM_CANDIDATES = 5
MAX_STEPS = 20_000
_NO_WEIGHTS = cast(Checkpoint, None)  # the scripted runner reads none

Candidates = tuple[tuple[str, float], ...]  # of one output position: token text and probability, best first


@dataclass(frozen=True)
class RequestInfo:
    """What is known of a request besides its trace. With n > 1 every sequence has its own."""

    request_id: str
    prompt_token_ids: tuple[int, ...] = ()
    # Index of the step that began when it came in, or would have, had static batching let it; -1 = before all of them.
    arrival: int = 0
    priority: int = 0
    candidates: tuple[Candidates, ...] = ()  # by output position; empty when nobody asked the model
    number: int | None = None  # for its letter and colour, where it is not its place among the requests


@dataclass(frozen=True)
class Change:
    """Limits of the scheduler that are others from a step on: an index of the trace, and options by name."""

    step: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class RunInfo:
    """How a run came about."""

    title: str
    tier: str
    model: str
    block_size: int
    num_blocks: int = 0  # of the pool, with the null block; 0 = to be counted in the trace
    requests: tuple[RequestInfo, ...] = ()
    pieces: Mapping[int, str] = field(default_factory=dict)  # token id -> its text, of those that occur
    options: Mapping[str, Any] = field(default_factory=dict)
    is_static: bool = False  # static batching: a batch is let in when the one before it has ended
    changes: tuple[Change, ...] = ()  # in order of step


@dataclass(frozen=True)
class Run:
    """A run, or the beginning of one."""

    info: RunInfo
    traces: Sequence[StepTrace]
    is_done: bool = True
    workload: Workload | None = None  # what would have to be played to get it again


def names_in(trace: StepTrace) -> tuple[str, ...]:
    """The requests that a step knows; some of them several times."""
    state = trace.state
    queues = (*state.running, *state.waiting, *state.swapped)
    return (*trace.num_scheduled_tokens, *queues, *trace.sampled_token_ids)


def all_requests(run: Run) -> list[RequestInfo]:
    """The requests of a run; those that its description leaves out stand at the end, as old as their first step."""
    known = {request.request_id: request for request in run.info.requests}
    for number, trace in enumerate(run.traces):
        for name in names_in(trace):
            if name not in known:
                known[name] = RequestInfo(name, arrival=number)
    return list(known.values())


def make_engine(model: str, tier_name: str, options: Mapping[str, Any]) -> LLMEngine:
    """An engine that traces.

    Raises:
        ValueError: the tier is not there, the model cannot be read, or an option is not acceptable.
    """
    unknown = sorted(set(options) - set(EngineArgs.__dataclass_fields__))
    if unknown:
        raise ValueError(f"There is no engine option {unknown[0]!r}.")
    args = replace(EngineArgs(**options), trace=True)
    tier = load_tier(tier_name)
    if model == SCRIPTED:
        config = args.create_engine_config(SCRIPTED_MODEL, "cpu")
        engine = LLMEngine(config, ScriptedTier(tier), _NO_WEIGHTS, WordTokenizer())
    else:
        engine = LLMEngine.from_engine_args(replace(args, model=model), tier)
    engine.log_stats = False
    return engine


def make_changing_engine(
    model: str, tier_name: str, options: Mapping[str, Any], changes: Sequence[Change]
) -> tuple[LLMEngine, dict[int, SchedulerConfig]]:
    """An engine that can take the changes, and what its scheduler is to be told before which step.

    It is made with room for the largest of all limits, and with a host pool if swapping is ever asked for; neither
    shows in a schedule. The options must name `num_blocks`: without it the pool would follow from those limits.

    Raises:
        ValueError: see `make_engine`; or the options contradict each other after a change.
    """
    if not changes:
        return make_engine(model, tier_name, options), {}
    stages = [dict(options)]
    for change in changes:
        stages.append({**stages[-1], **change.options})
    args = [EngineArgs(**stage) for stage in stages]
    widest = {
        **options,
        "max_num_seqs": max(one.max_num_seqs for one in args),
        "max_num_batched_tokens": max(one.max_num_batched_tokens for one in args),
        "enable_chunked_prefill": True,
        "preemption_mode": "swap" if any(one.preemption_mode == "swap" for one in args) else "recompute",
    }
    engine = make_engine(model, tier_name, widest)
    config = engine.config
    limits = [one.create_engine_config(config.model, config.device).scheduler for one in args]
    engine.engine_core.reconfigure(limits[0])
    return engine, dict(zip((change.step for change in changes), limits[1:], strict=True))


class Recording:
    """A workload on its way through an engine.

    Args:
        title: what the run is called.
        workload: the requests; its engine options count.
        model: `scripted`, or what `LLM` takes.
        tier_name: the tier to run on.
        is_static: let requests in batch by batch, as servers did before continuous batching.
        changes: limits of the scheduler that change on the way.

    Raises:
        ValueError: see `make_engine`.
    """

    def __init__(
        self,
        title: str,
        workload: Workload,
        model: str,
        tier_name: str,
        is_static: bool = False,
        changes: tuple[Change, ...] = (),
    ) -> None:
        self.workload = workload
        self.engine, self._limits = make_changing_engine(model, tier_name, workload.config, changes)
        if model != SCRIPTED:
            workload = replace(workload, requests=tuple(map(_with_logprobs, workload.requests)))
        self._played = workload
        self.info = RunInfo(
            title=title,
            tier=tier_name,
            model=model,
            block_size=self.engine.config.cache.block_size,
            num_blocks=self.engine.config.cache.num_blocks,
            options=dict(workload.config),
            is_static=is_static,
            changes=changes,
        )
        self._by_id = {request.request_id: request for request in workload.requests}
        self._arrivals: dict[str, int] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._outputs: dict[str, RequestOutput] = {}

    @property
    def traces(self) -> list[StepTrace]:
        return self.engine.engine_core.traces

    def play(self) -> Iterator[int]:
        """Run to the end, a step at a time; yields the number of steps so far.

        Raises:
            ValueError: a request is not acceptable, or the run does not come to an end.
        """
        for batch in self._batches():
            run = WorkloadRun(self.engine, batch)
            while not run.is_done:
                if len(self.traces) >= MAX_STEPS:
                    raise ValueError(f"The run was stopped after {MAX_STEPS} steps; ask for fewer tokens.")
                before = len(self.traces)
                if before in self._limits:
                    self.engine.engine_core.reconfigure(self._limits.pop(before))
                self._note(run.step(), before)
                yield len(self.traces)

    def run(self, is_done: bool = True) -> Run:
        """What has been recorded so far."""
        ids = {name: output.prompt_token_ids for name, output in self._outputs.items()}
        prompts = {**self._prompts, **{name: tuple(ids_) for name, ids_ in ids.items() if ids_}}
        requests = []
        for request in self.workload.requests:
            output = self._outputs.get(request.request_id)
            for index in range(request.params.n):
                completion = None if output is None or index >= len(output.outputs) else output.outputs[index]
                requests.append(
                    RequestInfo(
                        child_request_id(request.request_id, index),
                        prompts.get(request.request_id, ()),
                        self._arrivals.get(request.request_id, request.arrival_step),
                        request.priority,
                        _candidates(completion.logprobs if completion is not None else None),
                    )
                )
        traces = list(self.traces)
        used = {token_id for request in requests for token_id in request.prompt_token_ids}
        for trace in traces:
            for token_ids in (*trace.sampled_token_ids.values(), *trace.draft_token_ids.values()):
                used.update(token_ids)
        pieces = {
            token_id: self.engine.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in used
        }
        return Run(
            replace(self.info, requests=tuple(requests), pieces=pieces), traces, is_done, self.workload
        )

    def _batches(self) -> list[Workload]:
        if not self.info.is_static:
            return [self._played]
        size = self.engine.config.scheduler.max_num_seqs
        requests = sorted(self._played.requests, key=lambda request: request.arrival_step)
        self._arrivals.update({request.request_id: request.arrival_step for request in requests})
        free_to_come = [replace(request, arrival_step=0) for request in requests]
        return [Workload(tuple(free_to_come[i : i + size])) for i in range(0, len(requests), size)]

    def _note(self, outputs: Sequence[RequestOutput], step: int) -> None:
        for name, state in self.engine.engine_core.scheduler.requests.items():
            if name in self._by_id and name not in self._prompts:
                self._prompts[name] = tuple(state.all_token_ids[: state.num_prompt_tokens])
                self._arrivals.setdefault(name, step)
        for output in outputs:
            self._outputs[output.request_id] = output
            self._arrivals.setdefault(output.request_id, step)


def _with_logprobs(request: Any) -> Any:
    return replace(request, params=replace(request.params, logprobs=NUM_CANDIDATES))


def _candidates(logprobs: Sequence[Mapping[int, Any]] | None) -> tuple[Candidates, ...]:
    """Best first; the sampled token stands in front of the table and may also be among the best."""
    return tuple(
        tuple(
            (entry.decoded_token, round(math.exp(entry.logprob), 4))
            for entry in sorted(table.values(), key=lambda entry: entry.rank)
        )
        for table in logprobs or ()
    )


def record(
    title: str,
    workload: Workload,
    model: str = SCRIPTED,
    tier_name: str = "reference",
    is_static: bool = False,
) -> Run:
    """Play a workload to its end. Raises ValueError as `Recording` does."""
    recording = Recording(title, workload, model, tier_name, is_static)
    for _ in recording.play():
        pass
    return recording.run()


class Progress:
    """Says when it is time to show the beginning of a run."""

    def __init__(self, interval_s: float) -> None:
        self._interval = interval_s
        self._last = time.perf_counter()

    def is_due(self) -> bool:
        now = time.perf_counter()
        if now - self._last < self._interval:
            return False
        self._last = now
        return True
