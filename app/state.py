"""A run as the page draws it: pure functions from traces to one JSON value.

Steps are differences from the step before, as in a trace file, so that thousands of steps with a hundred requests stay
a few megabytes; the browser unfolds them once and then steps without asking anybody. Requests are named by their index,
texts of tokens by their index in `pieces`, blocks by their number.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from app.compare import HASH_DIGITS, LANGUAGES, make_comparison
from app.facts import facts
from app.fork import OPTIONS, settings
from app.runs import RequestInfo, Run, all_requests
from app.sentences import step_sentence
from app.timeline import slots, timeline
from reference.contracts.trace import StepTrace
from reference.frontend.trace_file import encode_order

View = dict[str, Any]


def label(index: int) -> str:
    """A, B, ... Z, AA, AB, ...: a name short enough for a cell of the pool."""
    letters = string.ascii_uppercase
    return label(index // 26 - 1) + letters[index % 26] if index >= 26 else letters[index]


def make_view(run: Run) -> View:
    """All that the page needs of one run."""
    requests = all_requests(run)
    encoder = _StepEncoder(run, requests)
    filling = slots(run.traces, run.info.block_size)
    steps = [
        {**encoder.encode(number, trace), "filled": filled, "slots": held}
        for number, (trace, (filled, held)) in enumerate(zip(run.traces, filling, strict=True))
    ]
    rows, unknown = timeline(run, requests), unknown_tokens(run)
    return {
        "title": run.info.title,
        "tier": run.info.tier,
        "model": run.info.model,
        "block_size": run.info.block_size,
        "num_blocks": encoder.num_blocks,
        "options": dict(run.info.options),
        "is_static": run.info.is_static,
        "settings": settings(run.info) if run.workload is not None else None,
        "is_done": run.is_done,
        "requests": [
            {
                "id": request.request_id,
                "label": label(index if request.number is None else request.number),
                "number": index if request.number is None else request.number,
                "unknown": 0 if request.prompt_token_ids else unknown.get(request.request_id, 0),
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
        **({"forked_at": run.info.changes[-1].step} if run.info.changes else {}),
        "pieces": encoder.pieces.texts,
    }


def unknown_tokens(run: Run) -> dict[str, int]:
    """By request: the tokens before the first that the run saw sampled, which is the prompt if it saw them all."""
    unknown: dict[str, int] = {}
    seen: Counter[str] = Counter()
    for trace in run.traces:
        for name, known in trace.state.num_tokens.items():
            unknown.setdefault(name, known - seen[name])
        for name, ids in trace.sampled_token_ids.items():
            seen[name] += len(ids)
    return unknown


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
        counted = 0 if first is None else first.num_free_blocks + len(first.ref_counts)
        self.num_blocks = run.info.num_blocks - 1 if run.info.num_blocks else counted
        self._before: StepTrace | None = None
        self._queues: dict[str, list[int]] = {}
        self._entered: set[str] = set()
        self._awaited: dict[int, list[int]] = {}  # by request of the step before: its row, if it decodes on

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
        rows = [self._scheduled(trace, name) for name in trace.num_scheduled_tokens]
        entry["sched"] = [row[0] if row == self._awaited.get(row[0]) else row for row in rows]
        self._awaited = {row[0]: _next_decode(row) for row in rows}
        entry.update(self._cache(trace))
        entry.update(self._events(trace))
        entry["say"] = {language: step_sentence(trace, self._label, language) for language in LANGUAGES}
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

    def _tables(self, before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]]) -> View:
        """Tables that grew at their end (`grow`: by what), that changed otherwise (`tables`), that are gone."""
        entry: View = {
            "grow": {},
            "tables": {},
            "gone": self._of(name for name in before if name not in after),
        }
        for name, table in after.items():
            old = before.get(name)
            if old == table:
                continue
            has_grown = old is not None and table[: len(old)] == old
            where, blocks = ("grow", table[len(old or ()) :]) if has_grown else ("tables", table)
            entry[where][str(self.index[name])] = blocks
        return entry

    def _cache(self, trace: StepTrace) -> View:
        """Block tables, free queue and hashes, as far as they changed, and what became of blocks in this step."""
        cache = trace.state.cache
        before = None if self._before is None else self._before.state.cache
        tables = {} if before is None else before.block_tables
        host = {} if before is None else before.host_tables
        hashes = {} if before is None else before.hashes
        held = set() if before is None else set(before.ref_counts)
        entry: View = {
            **self._tables(tables, cache.block_tables),
            "host": {
                str(self.index[name]): table
                for name, table in cache.host_tables.items()
                if host.get(name) != table
            },
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
        return {name: value for name, value in entry.items() if value}


def _next_decode(row: Sequence[int]) -> list[int]:
    """The row of the step after, where a request decodes on: of most, so that their index says it all."""
    index, count, _, start, known, _, _ = row
    return [index, 1, 1, start + count, known + 1, 0, 0]


def make_page(runs: Sequence[Run], lesson: Mapping[str, Any] | None = None, is_same: bool = False) -> View:
    """The value of the viewer: one run, or several with their comparison to the first, and what is said above them.

    Args:
        runs: one, two or three.
        lesson: `title` and `lesson` by language, `facts` (keys), `sides` (titles by language); None for a loaded trace.
        is_same: runs of the same workload with the same options, which must not differ.
    """
    page: View = {"runs": [make_view(run) for run in runs], **(lesson or {})}
    page["options"] = [asdict(option) for option in OPTIONS]
    names = (
        page.pop("names", None)
        or page.get("sides")
        or [dict.fromkeys(LANGUAGES, run.info.title) for run in runs]
    )
    page["comparisons"] = [
        make_comparison(runs[0], other, is_same, (names[0], name))
        for other, name in zip(runs[1:], names[1:], strict=False)
    ]
    return page
