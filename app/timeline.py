"""Who did what in which step: the rows of the timeline, and how full the blocks were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from app.runs import RequestInfo, Run
from reference.contracts.trace import StepTrace

View = dict[str, Any]


def slots(traces: Iterable[StepTrace], block_size: int) -> list[tuple[int, int]]:
    """By step: (slots that hold a token, slots of all held blocks) when it is done; a shared block counts once."""
    filling = _Filling(block_size)
    return [filling.after(trace) for trace in traces]


class _Filling:
    """How full each held block is. A step costs what it changes: a long run holds thousands of blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: Mapping[str, Sequence[int]] = {}
        self._computed: dict[str, int] = {}
        self._holders: dict[int, dict[str, int]] = {}  # by block: the place in the table of each holder
        self._fill: dict[int, int] = {}
        self._filled = 0

    def after(self, trace: StepTrace) -> tuple[int, int]:
        before, after = self._tables, trace.state.cache.block_tables
        computed = {name: trace.state.num_computed_tokens.get(name, 0) for name in after}
        dirty: set[int] = set()
        for name in {**before, **after}:
            dirty.update(self._moved(name, before.get(name, ()), after.get(name, ())))
            dirty.update(
                self._written(after.get(name, ()), self._computed.get(name, 0), computed.get(name, 0))
            )
        self._tables, self._computed = after, computed
        for block in dirty - {0}:
            self._count(block)
        return self._filled, self._block_size * len(self._fill)

    def _moved(self, name: str, before: Sequence[int], after: Sequence[int]) -> set[int]:
        """Blocks that came into the table of a request, or left it."""
        if before == after:
            return set()
        pairs = enumerate(zip_longest(before, after, fillvalue=0))
        changed = [(place, old, new) for place, (old, new) in pairs if old != new]
        for _, old, _ in changed:
            self._holders.get(old, {}).pop(name, None)
        for place, _, new in changed:
            self._holders.setdefault(new, {})[name] = place
        return {block for _, *blocks in changed for block in blocks}

    def _written(self, table: Sequence[int], before: int, after: int) -> Sequence[int]:
        """Blocks of positions that were computed now, or thrown away."""
        first, last = sorted((before, after))
        return table[first // self._block_size : -(-last // self._block_size)]

    def _count(self, block: int) -> None:
        size, holders = self._block_size, self._holders.get(block)
        self._filled -= self._fill.pop(block, 0)
        if not holders:
            self._holders.pop(block, None)
            return
        computed = [self._computed[name] - place * size for name, place in holders.items()]
        self._fill[block] = min(max(*computed, 0), size)
        self._filled += self._fill[block]


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
    row: View = {key: news[key] for key in ("end", "reason") if key in news}
    if request.arrival < 0:
        return row
    start = run.traces[request.arrival].started
    for name, key in (("ttft", "first"), ("latency", "end")):
        if key in news:
            trace = run.traces[news[key]]
            row[f"{name}_steps"] = news[key] - request.arrival + 1
            row[f"{name}_s"] = round(trace.started + trace.seconds - start, 6)
    return row
