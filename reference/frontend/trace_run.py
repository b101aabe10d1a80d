"""`twinfer trace`: run a workload, record every step, and say on one screen what happened."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from reference.contracts.protocols import Tier
from reference.contracts.trace import StepTrace
from reference.frontend.chrome_trace import write_chrome_trace
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.trace_file import write_trace
from reference.frontend.workload import Workload, run_workload


@dataclass(frozen=True)
class TraceSummary:
    """Totals of a run; tokens unless said otherwise."""

    num_steps: int
    num_prefill_tokens: int  # computed; those of a preempted request count again
    num_decode_tokens: int
    num_sampled_tokens: int
    num_draft_tokens: int  # that were checked
    num_accepted_tokens: int  # of these
    num_queried_tokens: int  # what the prefix cache was asked for by requests on their first admission
    num_cached_tokens: int  # and had
    num_resumed_queried_tokens: (
        int  # the same of requests on their way back from a preemption: see `metrics.py`
    )
    num_resumed_cached_tokens: int
    num_preemptions: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_block_copies: int  # copies-on-write
    num_evicted_blocks: int
    peak_blocks: int
    num_usable_blocks: int
    peak_running: int
    peak_waiting: int  # the swapped ones included
    median_step_s: float

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


def summarise(traces: Sequence[StepTrace]) -> TraceSummary:
    """Totals of the steps of one run; all zero when there are none."""
    by_kind = {"prefill": 0, "decode": 0}
    queried, cached = {False: 0, True: 0}, {False: 0, True: 0}  # by: was it resumed?
    preempted: set[str] = set()  # and not yet resumed
    checked = [
        (len(drafts), len(trace.sampled_token_ids[request_id]) - 1)
        for trace in traces
        for request_id, drafts in trace.draft_token_ids.items()
        if request_id in trace.sampled_token_ids
    ]
    for trace in traces:
        for request_id, count in trace.num_scheduled_tokens.items():
            by_kind[trace.kinds[request_id]] += count
        for request_id, num_cached_tokens in trace.num_cached_tokens.items():
            is_resumed = request_id in preempted
            queried[is_resumed] += trace.state.num_tokens[request_id]
            cached[is_resumed] += num_cached_tokens
        preempted = preempted.union(trace.preempted).difference(trace.num_cached_tokens, trace.finished)
    caches = [trace.state.cache for trace in traces]
    return TraceSummary(
        num_steps=len(traces),
        num_prefill_tokens=by_kind["prefill"],
        num_decode_tokens=by_kind["decode"],
        num_sampled_tokens=sum(len(ids) for trace in traces for ids in trace.sampled_token_ids.values()),
        num_draft_tokens=sum(num_drafts for num_drafts, _ in checked),
        num_accepted_tokens=sum(num_accepted for _, num_accepted in checked),
        num_queried_tokens=queried[False],
        num_cached_tokens=cached[False],
        num_resumed_queried_tokens=queried[True],
        num_resumed_cached_tokens=cached[True],
        num_preemptions=sum(len(trace.preempted) for trace in traces),
        num_swapped_out_blocks=sum(len(trace.swap_outs) for trace in traces),
        num_swapped_in_blocks=sum(len(trace.swap_ins) for trace in traces),
        num_block_copies=sum(len(trace.block_copies) for trace in traces),
        num_evicted_blocks=sum(len(cache.evicted) for cache in caches),
        peak_blocks=max((len(cache.ref_counts) for cache in caches), default=0),
        num_usable_blocks=max((len(cache.ref_counts) + cache.num_free_blocks for cache in caches), default=0),
        peak_running=max((len(trace.state.running) for trace in traces), default=0),
        peak_waiting=max(
            (len(trace.state.waiting) + len(trace.state.swapped) for trace in traces), default=0
        ),
        median_step_s=statistics.median(trace.seconds for trace in traces) if traces else 0.0,
    )


def trace_workload(
    tier: Tier, args: EngineArgs, workload: Workload, out: Path | None = None, chrome: Path | None = None
) -> int:
    """Run a workload with tracing, write the files that are asked for, and print the totals.

    Returns:
        0, or 1 when a request ended with an error.

    Raises:
        ValueError: the workload or an option is not acceptable, or a file's folder does not exist.
    """
    for path in (out, chrome):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"There is no folder {str(path.parent)!r} to write {path.name} into.")
    engine = LLMEngine.from_engine_args(replace(args, trace=True), tier)
    finished = run_workload(engine, workload)
    traces = engine.engine_core.traces
    if out is not None:
        write_trace(traces, out)
    if chrome is not None:
        write_chrome_trace(traces, chrome)
    print_summary(summarise(traces), tier.name, len(finished))
    errors = {name: output.error for name, output in finished.items() if output.error is not None}
    for name, error in errors.items():
        Console(stderr=True, highlight=False).print(f"{name} failed: {error}", markup=False)
    return 1 if errors else 0


def print_summary(summary: TraceSummary, tier_name: str, num_requests: int) -> None:
    rows = {
        "requests": str(num_requests),
        "steps": f"{summary.num_steps}, of {1000 * summary.median_step_s:.1f} ms (median)",
        "tokens sampled": str(summary.num_sampled_tokens),
        "drafts accepted": f"{summary.num_accepted_tokens} of {summary.num_draft_tokens}",
        "tokens computed": f"{summary.num_prefill_tokens} prefill, {summary.num_decode_tokens} decode",
        "prefix cache": f"{summary.num_cached_tokens} of {summary.num_queried_tokens} tokens hit"
        f" ({summary.hit_rate:.1%})",
        "found again by resumed": f"{summary.num_resumed_cached_tokens} of {summary.num_resumed_queried_tokens} tokens",
        "preemptions": str(summary.num_preemptions),
        "blocks swapped out, in": f"{summary.num_swapped_out_blocks}, {summary.num_swapped_in_blocks}",
        "blocks copied on write": str(summary.num_block_copies),
        "evicted blocks": str(summary.num_evicted_blocks),
        "peak blocks held": f"{summary.peak_blocks} of {summary.num_usable_blocks}",
        "peak running, waiting": f"{summary.peak_running}, {summary.peak_waiting}",
    }
    table = Table("", tier_name, box=box.SIMPLE_HEAD, pad_edge=False)
    for label, value in rows.items():
        table.add_row(label, value)
    Console(highlight=False).print(table)
