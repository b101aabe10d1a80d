"""Playing a workload, and what is kept of it: the trace, and the texts that a trace alone does not hold."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from app.scripted import SCRIPTED_MODEL, ScriptedTier, WordTokenizer
from reference.contracts.protocols import Checkpoint
from reference.contracts.request import child_request_id
from reference.contracts.trace import StepTrace
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from reference.frontend.trace_file import read_trace, write_trace
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
    arrival: int = (
        0  # index of the step that began when it came in, or would have, had static batching let it
    )
    priority: int = 0
    candidates: tuple[Candidates, ...] = ()  # by output position; empty when nobody asked the model


@dataclass(frozen=True)
class RunInfo:
    """How a run came about."""

    title: str
    tier: str
    model: str
    block_size: int
    requests: tuple[RequestInfo, ...] = ()
    pieces: Mapping[int, str] = field(default_factory=dict)  # token id -> its text, of those that occur
    options: Mapping[str, Any] = field(default_factory=dict)
    is_static: bool = False  # static batching: a batch is let in when the one before it has ended


@dataclass(frozen=True)
class Run:
    """A run, or the beginning of one."""

    info: RunInfo
    traces: Sequence[StepTrace]
    is_done: bool = True


def all_requests(run: Run) -> list[RequestInfo]:
    """The requests of a run; those that its description leaves out stand at the end, as old as their first step."""
    known = {request.request_id: request for request in run.info.requests}
    for number, trace in enumerate(run.traces):
        state = trace.state
        names = (*trace.num_scheduled_tokens, *state.running, *state.waiting, *state.swapped)
        for name in (*names, *trace.sampled_token_ids):
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


class Recording:
    """A workload on its way through an engine.

    Args:
        title: what the run is called.
        workload: the requests; its engine options count.
        model: `scripted`, or what `LLM` takes.
        tier_name: the tier to run on.
        is_static: let requests in batch by batch, as servers did before continuous batching.

    Raises:
        ValueError: see `make_engine`.
    """

    def __init__(
        self, title: str, workload: Workload, model: str, tier_name: str, is_static: bool = False
    ) -> None:
        self.engine = make_engine(model, tier_name, workload.config)
        if model != SCRIPTED:
            workload = replace(workload, requests=tuple(map(_with_logprobs, workload.requests)))
        self.workload = workload
        self.info = RunInfo(
            title=title,
            tier=tier_name,
            model=model,
            block_size=self.engine.config.cache.block_size,
            options=dict(workload.config),
            is_static=is_static,
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
        return Run(replace(self.info, requests=tuple(requests), pieces=pieces), traces, is_done)

    def _batches(self) -> list[Workload]:
        if not self.info.is_static:
            return [self.workload]
        size = self.engine.config.scheduler.max_num_seqs
        requests = sorted(self.workload.requests, key=lambda request: request.arrival_step)
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


def save_run(run: Run, path: Path) -> None:
    """Write a trace file with one entry more, `run`, that other readers of traces pass over."""
    write_trace(run.traces, path)
    document = json.loads(path.read_text(encoding="ascii"))
    info = run.info
    document["run"] = {
        "title": info.title, "tier": info.tier, "model": info.model, "block_size": info.block_size,
        "options": dict(info.options), "is_static": info.is_static,
        "pieces": [[token_id, text] for token_id, text in info.pieces.items()],
        "requests": [
            [r.request_id, r.prompt_token_ids, r.arrival, r.priority, r.candidates] for r in info.requests
        ],
    }  # fmt: skip
    path.write_text(json.dumps(document, separators=(",", ":")), encoding="ascii")


def load_run(path: Path) -> Run:
    """Read what `save_run` or `twinfer trace --out` wrote.

    Raises:
        ValueError: the file cannot be read, is no trace, or is damaged.
    """
    traces = read_trace(path)
    if not traces:
        raise ValueError(f"{path.name} holds no step.")
    table = json.loads(path.read_text(encoding="utf-8")).get("run")
    if table is None:
        return Run(RunInfo(path.stem, "?", "?", infer_block_size(traces)), traces)
    try:
        return Run(_parse_info(table), traces)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path.name} has a damaged description of its run; record it again.") from error


def _parse_info(table: Any) -> RunInfo:
    block_size = int(table["block_size"])
    if block_size < 1:
        raise ValueError(block_size)
    requests = [
        RequestInfo(
            str(name),
            tuple(map(int, prompt)),
            int(arrival),
            int(priority),
            tuple(tuple((str(text), float(p)) for text, p in entry) for entry in candidates),
        )
        for name, prompt, arrival, priority, candidates in table["requests"]
    ]
    return RunInfo(
        title=str(table["title"]),
        tier=str(table["tier"]),
        model=str(table["model"]),
        block_size=block_size,
        requests=tuple(requests),
        pieces={int(token_id): str(text) for token_id, text in table["pieces"]},
        options=dict(table["options"]),
        is_static=bool(table["is_static"]),
    )


def infer_block_size(traces: Sequence[StepTrace]) -> int:
    """Tokens a block holds, from a trace that does not say it: exact as soon as one table was ever full.

    A table of k blocks that covers c computed tokens means at least c / k tokens a block.
    """
    sizes = (
        -(-trace.state.num_computed_tokens.get(name, 0) // len(table))
        for trace in traces
        for name, table in trace.state.cache.block_tables.items()
        if table
    )
    return max(sizes, default=1) or 1
