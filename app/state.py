"""A run as the page draws it: pure functions from traces to one JSON value.

Steps are differences from the step before, as in a trace file, so that thousands of steps with a hundred requests stay
a few megabytes; the browser unfolds them once and then steps without asking anybody. Requests are named by their index,
texts of tokens by their index in `pieces`, blocks by their number.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.runs import RequestInfo, Run
from app.sentences import step_sentence
from reference.contracts.trace import StepTrace
from reference.frontend.trace_file import encode_order
from reference.frontend.trace_run import summarise

View = dict[str, Any]
HASH_DIGITS = 8  # of the 64 that a hash has in hex: enough to tell blocks apart by eye


def label(index: int) -> str:
    """A, B, ... Z, AA, AB, ...: a name short enough for a cell of the pool."""
    letters = string.ascii_uppercase
    return label(index // 26 - 1) + letters[index % 26] if index >= 26 else letters[index]


def make_view(run: Run) -> View:
    """All that the page needs of one run."""
    requests = _all_requests(run)
    encoder = _StepEncoder(run, requests)
    steps = [encoder.encode(number, trace) for number, trace in enumerate(run.traces)]
    rows = timeline(run, requests)
    return {
        "title": run.info.title,
        "tier": run.info.tier,
        "model": run.info.model,
        "block_size": run.info.block_size,
        "num_blocks": encoder.num_blocks,
        "options": dict(run.info.options),
        "is_static": run.info.is_static,
        "is_done": run.is_done,
        "requests": [
            {
                "id": request.request_id,
                "label": label(index),
                "priority": request.priority,
                "arrival": request.arrival,
                "prompt": encoder.pieces.of(request.prompt_token_ids),
                "candidates": request.candidates,
                **row,
            }
            for index, (request, row) in enumerate(zip(requests, rows, strict=True))
        ],
        "steps": steps,
        "facts": facts(run),
        "pieces": encoder.pieces.texts,
    }


def _all_requests(run: Run) -> list[RequestInfo]:
    """The requests of a run; those of a trace whose description leaves them out stand at the end."""
    known = {request.request_id: request for request in run.info.requests}
    for trace in run.traces:
        for name in (
            *trace.state.running,
            *trace.state.waiting,
            *trace.state.swapped,
            *trace.sampled_token_ids,
        ):
            known.setdefault(name, RequestInfo(name))
    return list(known.values())


@dataclass
class _Pieces:
    """Texts of tokens, each written once."""

    by_id: Mapping[int, str]
    texts: list[str] = field(default_factory=list)
    _index: dict[int, int] = field(default_factory=dict)

    def of(self, token_ids: Iterable[int]) -> list[int]:
        return [self._of(token_id) for token_id in token_ids]

    def _of(self, token_id: int) -> int:
        if token_id not in self._index:
            self._index[token_id] = len(self.texts)
            self.texts.append(self.by_id.get(token_id, f" #{token_id}"))
        return self._index[token_id]


class _StepEncoder:
    """Steps one after another, each as its difference from the one before."""

    def __init__(self, run: Run, requests: Sequence[RequestInfo]) -> None:
        self.run = run
        self.requests = requests
        self.index = {request.request_id: i for i, request in enumerate(requests)}
        self.pieces = _Pieces(run.info.pieces)
        first = run.traces[0].state.cache if run.traces else None
        self.num_blocks = 0 if first is None else first.num_free_blocks + len(first.ref_counts)
        self._before: StepTrace | None = None
        self._queues: dict[str, list[int]] = {}
        self._entered: set[str] = set()

    def encode(self, number: int, trace: StepTrace) -> View:
        state, step = trace.state, trace.step
        entry: View = {"n": step, "t": round(trace.started, 6), "s": round(trace.seconds, 6)}
        entry["budget"] = trace.token_budget
        self._entered.update(state.running, state.waiting, state.swapped)
        queues = {
            "run": self._of(state.running),
            "wait": self._of(state.waiting),
            "swap": self._of(state.swapped),
            "held": self._held(number),
        }
        entry.update({name: queue for name, queue in queues.items() if self._queues.get(name, []) != queue})
        self._queues = queues
        entry["sched"] = [self._scheduled(trace, name) for name in trace.num_scheduled_tokens]
        entry.update(self._cache(trace))
        entry.update(self._events(trace))
        entry["say"] = {language: step_sentence(trace, self._label, language) for language in ("en", "zh")}
        self._before = trace
        return entry

    def _of(self, names: Iterable[str]) -> list[int]:
        return [self.index[name] for name in names]

    def _label(self, name: str) -> str:
        return label(self.index[name]) if name in self.index else name

    def _held(self, number: int) -> list[int]:
        """Requests that have come but that static batching keeps out."""
        if not self.run.info.is_static:
            return []
        return [
            self.index[request.request_id]
            for request in self.requests
            if request.arrival <= number and request.request_id not in self._entered
        ]

    def _scheduled(self, trace: StepTrace, name: str) -> list[int]:
        """[request, tokens, 1 for a decode, first position, tokens known, drafts checked, drafts accepted]."""
        count = trace.num_scheduled_tokens[name]
        drafts = len(trace.draft_token_ids.get(name, ()))
        sampled = len(trace.sampled_token_ids.get(name, ()))
        end = trace.state.num_computed_tokens.get(name, count)
        return [
            self.index[name], count, int(trace.kinds[name] == "decode"), end - count,
            trace.state.num_tokens.get(name, end), drafts, max(min(drafts, sampled - 1), 0),
        ]  # fmt: skip

    def _cache(self, trace: StepTrace) -> View:
        """Block tables, free queue and hashes, as far as they changed, and what became of blocks in this step."""
        cache = trace.state.cache
        before = None if self._before is None else self._before.state.cache
        tables = {} if before is None else before.block_tables
        host = {} if before is None else before.host_tables
        hashes = {} if before is None else before.hashes
        held = set() if before is None else set(before.ref_counts)
        entry: View = {
            "tables": {
                str(self.index[name]): table
                for name, table in cache.block_tables.items()
                if tables.get(name) != table
            },
            "host": {
                str(self.index[name]): table
                for name, table in cache.host_tables.items()
                if host.get(name) != table
            },
            "gone": self._of(name for name in tables if name not in cache.block_tables),
            "hash": [
                *([b, h[:HASH_DIGITS]] for b, h in cache.hashes.items() if hashes.get(b) != h),
                *([b, None] for b in hashes if b not in cache.hashes),
            ],
            "idle": [
                [self.index[name], trace.state.num_computed_tokens[name], trace.state.num_tokens[name]]
                for name in trace.state.running
                if name not in trace.num_scheduled_tokens
            ],
        }
        if before is None or before.free_order != cache.free_order:
            entry["free"] = encode_order(() if before is None else before.free_order, cache.free_order)
        hits = self._hits(trace)
        entry["hit"] = sorted(hits)
        entry["alloc"] = sorted(set(cache.ref_counts) - held - hits)
        entry["freed"] = sorted(held - set(cache.ref_counts))
        entry["evict"] = sorted(cache.evicted)
        return {name: value for name, value in entry.items() if value or name == "free"}

    def _hits(self, trace: StepTrace) -> set[int]:
        """Blocks that requests admitted in this step found in the prefix cache."""
        size, tables = self.run.info.block_size, trace.state.cache.block_tables
        return {
            block
            for name, count in trace.num_cached_tokens.items()
            for block in tables.get(name, ())[: count // size]
            if block
        }

    def _events(self, trace: StepTrace) -> View:
        entry: View = {
            "copy": [list(copy) for copy in trace.block_copies],
            "out": [list(swap) for swap in trace.swap_outs],
            "in": [list(swap) for swap in trace.swap_ins],
            "cached": {str(self.index[n]): count for n, count in trace.num_cached_tokens.items() if count},
            "tok": {str(self.index[n]): self.pieces.of(ids) for n, ids in trace.sampled_token_ids.items()},
            "draft": {str(self.index[n]): self.pieces.of(ids) for n, ids in trace.draft_token_ids.items()},
            "pre": [[self.index[n], trace.preemption_reasons.get(n, "")] for n in trace.preempted],
            "ref": [
                [self.index[n], reason] for n, reason in trace.refusal_reasons.items() if n in self.index
            ],
            "fin": [[self.index[n], reason] for n, reason in trace.finished.items() if n in self.index],
        }
        filled, held = slots(trace, self.run.info.block_size)
        return {"filled": filled, "slots": held, **{name: value for name, value in entry.items() if value}}


def slots(trace: StepTrace, block_size: int) -> tuple[int, int]:
    """(slots that hold a token, slots of all held blocks) when the step is done; a shared block counts once."""
    fill: dict[int, int] = {}
    for name, table in trace.state.cache.block_tables.items():
        computed = trace.state.num_computed_tokens.get(name, 0)
        for position, block in enumerate(table):
            if block:
                here = min(max(computed - position * block_size, 0), block_size)
                fill[block] = max(fill.get(block, 0), here)
    return sum(fill.values()), block_size * len(fill)


def timeline(run: Run, requests: Sequence[RequestInfo]) -> list[View]:
    """For each request: its segments `[kind, first step, steps, tokens]`, and when its tokens came.

    Kinds: held (kept out by static batching), queued, prefill, decode, idle (running, but not in this step), preempted,
    swapped. A prefill chunk is a segment of its own; all others are drawn together as long as they last.
    """
    rows: dict[str, list[list[Any]]] = {request.request_id: [] for request in requests}
    news: dict[str, View] = {request.request_id: {} for request in requests}
    waits_as: dict[str, str] = {}
    arrivals = {request.request_id: request.arrival for request in requests}
    seen: set[str] = set()  # let in by static batching
    for number, trace in enumerate(run.traces):
        for name, kind, tokens in _doings(trace, waits_as):
            _extend(rows[name], kind, number, tokens)
        inside = {
            *trace.num_scheduled_tokens,
            *trace.state.running,
            *trace.state.waiting,
            *trace.state.swapped,
        }
        if run.info.is_static:
            seen.update(inside)
            for name in rows:
                if name not in seen and arrivals[name] <= number:
                    _extend(rows[name], "held", number, 0)
        for name in trace.sampled_token_ids:
            news[name].setdefault("first", number)
        for name, reason in trace.finished.items():
            if name in news:
                news[name].update(end=number, reason=reason)
    return [{"segments": rows[r.request_id], **_delays(run, r, news[r.request_id])} for r in requests]


def _doings(trace: StepTrace, waits_as: dict[str, str]) -> Iterable[tuple[str, str, int]]:
    """(request, kind, tokens) of one step; `waits_as` remembers why a request waits."""
    state = trace.state
    for name in trace.preempted:
        waits_as[name] = "preempted"
    for name, count in trace.num_scheduled_tokens.items():
        waits_as.pop(name, None)
        yield name, trace.kinds[name], count
    for name in state.running:
        if name not in trace.num_scheduled_tokens:
            yield name, "idle", 0
    for name in state.waiting:
        yield name, waits_as.get(name, "queued"), 0
    for name in state.swapped:
        yield name, "swapped", 0


def _extend(row: list[list[Any]], kind: str, number: int, tokens: int) -> None:
    last = row[-1] if row else None
    if last is not None and kind != "prefill" and last[0] == kind and last[1] + last[2] == number:
        last[2] += 1
        last[3] += tokens
    else:
        row.append([kind, number, 1, tokens])


def _delays(run: Run, request: RequestInfo, news: View) -> View:
    """Time to first token and to the end, in steps (1: within the step of arrival) and in seconds."""
    if not run.traces or request.arrival >= len(run.traces):
        return {}
    start = run.traces[request.arrival].started
    row: View = {}
    for name, key in (("ttft", "first"), ("latency", "end")):
        if key in news:
            trace = run.traces[news[key]]
            row[f"{name}_steps"] = news[key] - request.arrival + 1
            row[f"{name}_s"] = round(trace.started + trace.seconds - start, 6)
    return {**row, **{key: news[key] for key in ("end", "reason") if key in news}}


def facts(run: Run) -> dict[str, float | int | None]:
    """Figures of a run that a lesson may point at. None where there is nothing to count."""
    summary, traces, size = summarise(run.traces), run.traces, run.info.block_size
    requests = _all_requests(run)
    rows = timeline(run, requests)
    latencies = [row["latency_steps"] for row in rows if "latency_steps" in row]
    fills = [(filled, held) for filled, held in (slots(t, size) for t in traces) if held]
    urgent = [row for request, row in zip(requests, rows, strict=True) if request.request_id == "urgent"]
    tables = [table for trace in traces for table in trace.state.cache.block_tables.values()]
    return {
        "num_steps": summary.num_steps,
        "num_sampled_tokens": summary.num_sampled_tokens,
        "num_prefill_tokens": summary.num_prefill_tokens,
        "num_chunks": sum(kind == "prefill" for trace in traces for kind in trace.kinds.values()),
        "largest_step": max((trace.budget_used for trace in traces), default=0),
        "num_cached_tokens": summary.num_cached_tokens + summary.num_resumed_cached_tokens,
        "num_preemptions": summary.num_preemptions,
        "num_swapped_blocks": summary.num_swapped_out_blocks,
        "num_copies": summary.num_block_copies,
        "num_accepted": summary.num_accepted_tokens,
        "num_rejected": summary.num_draft_tokens - summary.num_accepted_tokens,
        "peak_blocks": summary.peak_blocks,
        "peak_running": summary.peak_running,
        "mean_running": _mean([len(trace.num_scheduled_tokens) for trace in traces]),
        "mean_latency_steps": _mean(latencies),
        "mean_fill": _mean([100 * filled / held for filled, held in fills]),
        "wasted_slots": _mean([held - filled for filled, held in fills]),
        "longest_table": max(map(len, tables), default=0),
        "most_holders": max((n for t in traces for n in t.state.cache.ref_counts.values()), default=0),
        "first_preemption": _first(traces, lambda trace: trace.preempted),
        "first_copy": _first(traces, lambda trace: trace.block_copies),
        "urgent_ttft": urgent[0].get("ttft_steps") if urgent else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 1) if values else None


def _first(traces: Sequence[StepTrace], has_event: Any) -> int | None:
    return next((number for number, trace in enumerate(traces) if has_event(trace)), None)


@dataclass(frozen=True)
class Difference:
    """Where two runs part: an index of both, and what differs there."""

    step: int
    what: str
    request_id: str | None
    values: tuple[Any, Any]


_COMPARED = (
    "num_scheduled_tokens", "preempted", "num_cached_tokens", "block_copies", "swap_outs", "swap_ins",
    "draft_token_ids", "sampled_token_ids", "refusal_reasons", "finished",
)  # fmt: skip


def first_difference(left: Run, right: Run) -> Difference | None:
    """The first step in which two runs did not do the same, and the first thing in it; times do not count."""
    for number, (one, two) in enumerate(zip(left.traces, right.traces, strict=False)):
        pairs: list[tuple[str, Any, Any]] = [
            ("block_tables", one.state.cache.block_tables, two.state.cache.block_tables),
            *((name, getattr(one, name), getattr(two, name)) for name in _COMPARED),
            ("free_order", one.state.cache.free_order, two.state.cache.free_order),
            ("hashes", one.state.cache.hashes, two.state.cache.hashes),
            ("queues", _queues(one), _queues(two)),
        ]
        for what, mine, other in pairs:
            if mine != other or (isinstance(mine, dict) and list(mine) != list(other)):
                return _explain(number, what, mine, other)
    if len(left.traces) != len(right.traces):
        return Difference(
            min(len(left.traces), len(right.traces)), "length", None, (len(left.traces), len(right.traces))
        )
    return None


def _queues(trace: StepTrace) -> tuple[Any, ...]:
    return trace.state.running, trace.state.waiting, trace.state.swapped


def _explain(number: int, what: str, mine: Any, other: Any) -> Difference:
    if isinstance(mine, dict):
        for name in dict.fromkeys((*mine, *other)):
            if mine.get(name) != other.get(name):
                return Difference(number, what, str(name), (mine.get(name), other.get(name)))
    return Difference(number, what, None, (mine, other))


def make_comparison(left: Run, right: Run, is_same_workload: bool) -> View:
    """What the page says about two runs: where they part. `is_same_workload`: they were meant to be equal."""
    difference = first_difference(left, right)
    view: View = {"meant_equal": is_same_workload, "difference": None}
    if difference is not None:
        view["difference"] = {
            "step": difference.step,
            "what": difference.what,
            "request": difference.request_id,
            "values": [_short(value) for value in difference.values],
        }
    return view


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(list(value) if isinstance(value, tuple) else value)
    if len(text) == 64 and all(c in string.hexdigits for c in text):
        return text[:HASH_DIGITS]
    return text if len(text) <= 80 else f"{text[:77]}..."


def make_page(runs: Sequence[Run], lesson: Mapping[str, Any] | None = None, is_same: bool = False) -> View:
    """The value of the viewer: one run, or two with their comparison, and what is said above them.

    Args:
        runs: one or two.
        lesson: `title` and `lesson` by language, `facts` (keys), `sides` (titles by language); None for a loaded trace.
        is_same: two runs of the same workload with the same options, which must not differ.
    """
    page: View = {"runs": [make_view(run) for run in runs], **(lesson or {})}
    if len(runs) == 2:
        page["comparison"] = make_comparison(runs[0], runs[1], is_same)
    return page
