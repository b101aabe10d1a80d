"""`twinfer bench seqs`: throughput against latency, by how many requests may run at once (`max_num_seqs`).

Each point runs twice as many requests as it lets run at once, 16 at least, all there from the beginning: the first
half measures a full batch, the second one the queue. The pool is large enough that nobody is preempted.
"""

from __future__ import annotations

import argparse
from typing import Any

from fast.bench.engines import (
    add_run_options,
    blocks_for,
    check_run_options,
    engine_args,
    median,
    workload_of,
)
from fast.bench.latency import KINDS, in_words, latencies
from fast.bench.plots import curves
from fast.bench.results import Document, make_document, print_table, report
from fast.bench.runner import make_engine, run_workload
from reference.contracts.protocols import Tier
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.model_store import resolve_model
from reference.frontend.tiers import pick_tier

LIMITS = (1, 8, 32, 128, 256)


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    parser.add_argument(
        "--limits", type=int, nargs="+", default=list(LIMITS), metavar="N",
        help=f"values of max_num_seqs (default: {' '.join(map(str, LIMITS))})",
    )  # fmt: skip
    add_run_options(parser, tier, repeat=1)


def run(arguments: argparse.Namespace) -> int:
    check_run_options(arguments)
    if min(arguments.limits) < 1:
        raise ValueError(f"--limits must be at least 1, got {min(arguments.limits)}.")
    tier = pick_tier(arguments.tier)
    rows = [_measure(arguments, tier, limit) for limit in sorted(set(arguments.limits))]
    document = make_document("seqs", tier=tier.name, workload="mixed", limits=rows)
    report(arguments, document, lambda: _print(document), lambda figure: _draw(document, figure))
    return 0


def _measure(arguments: argparse.Namespace, tier: Tier, limit: int) -> dict[str, Any]:
    args = engine_args(arguments, max_num_seqs=limit)
    vocab_size = load_checkpoint(resolve_model(args.model)).config.vocab_size
    workload = workload_of(arguments, "mixed", vocab_size, max(16, 2 * limit))
    if args.num_blocks is None and args.kv_cache_memory is None:
        args = engine_args(
            arguments, max_num_seqs=limit, num_blocks=blocks_for(workload, limit, args.block_size) + 1
        )
    engine = make_engine(args, tier)
    runs = [run_workload(engine, workload) for _ in range(arguments.repeat)]
    steps = sum(run.num_steps for run in runs)
    seconds = sum(run.seconds for run in runs)
    return {
        "max_num_seqs": limit,
        "requests": len(workload.requests),
        "num_blocks": engine.config.cache.num_blocks,
        "tokens_per_s": median([run.tokens_per_s for run in runs]),
        "total_tokens_per_s": median(
            [(run.num_prompt_tokens + run.num_output_tokens) / run.seconds for run in runs]
        ),
        "step_ms": 1e3 * seconds / steps,
        **latencies(runs),
    }


def _print(document: Document) -> None:
    headings = ["max_num_seqs", "requests", "tokens/s", "with prompts", "ms a step", *KINDS.values()]
    rows = [
        [
            str(r["max_num_seqs"]), str(r["requests"]), f"{r['tokens_per_s']:.1f}", f"{r['total_tokens_per_s']:.1f}",
            f"{r['step_ms']:.1f}", *(in_words(r[kind]) for kind in KINDS),
        ]
        for r in document["limits"]
    ]  # fmt: skip
    title = f"Sweep over max_num_seqs, {document['tier']} tier, workload mixed; times in ms: p50 / p90 / p99"
    print_table(title, headings, rows)


def _draw(document: Document, figure: Any) -> None:
    limits = document["limits"]
    x = [r["max_num_seqs"] for r in limits]
    throughput, between, first = figure.subplots(1, 3)
    rates = {
        "generated": [r["tokens_per_s"] for r in limits],
        "with prompts": [r["total_tokens_per_s"] for r in limits],
    }
    curves(throughput, "Throughput", x, rates, "max_num_seqs", "tokens/s")
    for axes, kind in ((between, "itl_ms"), (first, "ttft_ms")):
        lines = {p: [r[kind][p] for r in limits] for p in ("p50", "p99")}
        curves(axes, KINDS[kind].capitalize(), x, lines, "max_num_seqs", "ms")
