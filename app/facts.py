"""Figures of a run that a lesson may point at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from app.runs import Run, all_requests
from app.timeline import slots, timeline
from reference.contracts.trace import StepTrace
from reference.frontend.trace_run import summarise


def facts(run: Run) -> dict[str, float | int | None]:
    """By name; None where there is nothing to count."""
    summary, traces, size = summarise(run.traces), run.traces, run.info.block_size
    requests = all_requests(run)
    rows = timeline(run, requests)
    latencies = [row["latency_steps"] for row in rows if "latency_steps" in row]
    fills = [(filled, held) for filled, held in slots(traces, size) if held]
    urgent = [row for request, row in zip(requests, rows, strict=True) if request.request_id == "urgent"]
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
        "longest_table": _largest(map(len, t.state.cache.block_tables.values()) for t in traces),
        "most_holders": _largest(t.state.cache.ref_counts.values() for t in traces),
        "first_preemption": _first(traces, lambda trace: trace.preempted),
        "first_copy": _first(traces, lambda trace: trace.block_copies),
        "urgent_ttft": urgent[0].get("ttft_steps") if urgent else None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 1) if values else None


def _largest(rows: Iterable[Iterable[int]]) -> int:
    return max((max(row, default=0) for row in rows), default=0)


def _first(traces: Sequence[StepTrace], has_event: Any) -> int | None:
    return next((number for number, trace in enumerate(traces) if has_event(trace)), None)
