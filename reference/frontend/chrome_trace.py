"""A trace in the Chrome trace format: open it in https://ui.perfetto.dev or chrome://tracing.

One track a request, on which it is queued, prefilled in chunks, decoded and preempted; above them the engine's steps,
and counters of the KV cache and of the token budget. (Format: "Trace Event Format", a Google document of 2016.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference.contracts.trace import StepTrace

_PROCESS = 1
_STEPS = 0  # the track of the engine; requests follow from 1

Event = dict[str, Any]


def write_chrome_trace(traces: Sequence[StepTrace], path: Path) -> None:
    """Write the events of a run. Raises OSError when the file cannot be written."""
    document = {"displayTimeUnit": "ms", "traceEvents": chrome_events(traces)}
    path.write_text(json.dumps(document, separators=(",", ":")), encoding="ascii")


def chrome_events(traces: Iterable[StepTrace]) -> list[Event]:
    """The events of a run, in order of time; times are microseconds since the engine was made."""
    timeline = _Timeline()
    for trace in traces:
        timeline.add(trace)
    timeline.close()
    return timeline.events


@dataclass
class _Wait:
    """A stay in the waiting queue that has not ended."""

    name: str  # queued, preempted, swapped
    start: float
    reasons: list[str] = field(default_factory=list)


@dataclass
class _Timeline:
    events: list[Event] = field(default_factory=list)
    tracks: dict[str, int] = field(default_factory=dict)  # request id -> thread id
    waits: dict[str, _Wait] = field(default_factory=dict)  # of the requests that wait now
    end: float = 0.0  # of the last step

    def __post_init__(self) -> None:
        self.events.append({"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": "twinfer"}})
        self._name_track(_STEPS, "steps")

    def add(self, trace: StepTrace) -> None:
        start, self.end = trace.started * 1e6, (trace.started + trace.seconds) * 1e6
        self._add_step(trace, start)
        for request_id in (*trace.state.waiting, *trace.state.swapped):
            if request_id in trace.preemption_reasons:
                is_swapped = request_id in trace.state.swapped
                self.waits[request_id] = _Wait("swapped" if is_swapped else "preempted", start)
            wait = self.waits.setdefault(request_id, _Wait("queued", start))
            for sentences in (trace.preemption_reasons, trace.refusal_reasons):
                sentence = sentences.get(request_id)
                if (
                    sentence is not None and sentence not in wait.reasons
                ):  # it may wait long for the same thing
                    wait.reasons.append(sentence)
        for request_id, num_tokens in trace.num_scheduled_tokens.items():
            self._stop_waiting(request_id, start)
            kind = trace.kinds[request_id]
            args: dict[str, Any] = {
                "tokens": num_tokens,
                "num_computed_tokens": trace.state.num_computed_tokens[request_id],
                "block_table": list(trace.state.cache.block_tables[request_id]),
            }
            if request_id in trace.draft_token_ids:
                args["drafts"] = list(trace.draft_token_ids[request_id])
            if request_id in trace.num_cached_tokens:
                args["num_cached_tokens"] = trace.num_cached_tokens[request_id]
            name = kind if kind == "decode" else f"{kind} {num_tokens}"
            self._span(self._track(request_id), name, start, self.end, args)
        for request_id, reason in trace.finished.items():
            self._stop_waiting(request_id, self.end)
            self._event("i", f"finished: {reason}", self._track(request_id), self.end, s="t")

    def close(self) -> None:
        """What still waits when the recording ends waits until then."""
        for request_id in list(self.waits):
            self._stop_waiting(request_id, self.end)

    def _add_step(self, trace: StepTrace, start: float) -> None:
        state = trace.state
        args = {
            "running": len(state.running),
            "waiting": len(state.waiting),
            "swapped": len(state.swapped),
            "reasons": [*trace.preemption_reasons.values(), *trace.refusal_reasons.values()],
        }
        self._span(_STEPS, f"step {trace.step}", start, self.end, args)
        blocks = {"held": len(state.cache.ref_counts), "free": state.cache.num_free_blocks}
        self._event("C", "KV blocks", _STEPS, start, args=blocks)
        budget = {"used": trace.budget_used, "unused": trace.budget_unused}
        self._event("C", "token budget", _STEPS, start, args=budget)

    def _stop_waiting(self, request_id: str, end: float) -> None:
        wait = self.waits.pop(request_id, None)
        if wait is not None:
            self._span(self._track(request_id), wait.name, wait.start, end, {"reasons": wait.reasons})

    def _track(self, request_id: str) -> int:
        if request_id not in self.tracks:
            self.tracks[request_id] = len(self.tracks) + 1
            self._name_track(self.tracks[request_id], request_id)
        return self.tracks[request_id]

    def _name_track(self, track: int, name: str) -> None:
        for what, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": track})):
            self.events.append({"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "args": args})

    def _span(self, track: int, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        self._event("X", name, track, start, dur=round(end - start, 3), args=args)

    def _event(self, phase: str, name: str, track: int, time: float, **details: Any) -> None:
        self.events.append(
            {"ph": phase, "name": name, "pid": _PROCESS, "tid": track, "ts": round(time, 3), **details}
        )
