"""`twinfer bench latency`: what one of several requests feels that are there at once (64 tokens in, 64 out)."""

from __future__ import annotations

import argparse
from typing import Any

from fast.bench.engines import add_run_options, check_run_options, engine_args, workload_of
from fast.bench.plots import curves
from fast.bench.results import Document, make_document, print_table, report
from fast.bench.runner import Run, make_engine, percentiles_ms, run_workload
from reference.frontend.tiers import pick_tier

KINDS = {"ttft_ms": "time to first token", "itl_ms": "between tokens", "e2e_ms": "whole answer"}


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=[1, 8, 32], metavar="N",
        help="requests at once; several give a row each (default: 1 8 32)",
    )  # fmt: skip
    add_run_options(parser, tier)


def run(arguments: argparse.Namespace) -> int:
    check_run_options(arguments)
    if min(arguments.batch_size) < 1:
        raise ValueError(f"--batch-size must be at least 1, got {min(arguments.batch_size)}.")
    tier = pick_tier(arguments.tier)
    engine = make_engine(engine_args(arguments), tier)
    rows = []
    for batch_size in arguments.batch_size:
        workload = workload_of(arguments, "uniform", engine.config.model.vocab_size, batch_size)
        runs = [run_workload(engine, workload) for _ in range(arguments.repeat)]
        rows.append({"batch_size": len(workload.requests), **latencies(runs)})
    document = make_document("latency", tier=tier.name, workload="uniform", batches=rows)
    report(arguments, document, lambda: _print(document), lambda figure: _draw(document, figure))
    return 0


def latencies(runs: list[Run]) -> dict[str, Any]:
    """Percentiles over the requests of all runs, in milliseconds."""
    requests = [request for run in runs for request in run.requests]
    return {
        "ttft_ms": percentiles_ms([request.ttft for request in requests]),
        "itl_ms": percentiles_ms([gap for request in requests for gap in request.gaps]),
        "e2e_ms": percentiles_ms([request.latency for request in requests]),
    }


def in_words(percentiles: dict[str, float]) -> str:
    return " / ".join(f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in percentiles.values())


def _print(document: Document) -> None:
    rows = [[str(b["batch_size"]), *(in_words(b[kind]) for kind in KINDS)] for b in document["batches"]]
    print_table(
        f"Latency of {document['tier']} in ms: p50 / p90 / p99", ["requests at once", *KINDS.values()], rows
    )


def _draw(document: Document, figure: Any) -> None:
    batches = document["batches"]
    for axes, (kind, title) in zip(figure.subplots(1, 3), KINDS.items(), strict=True):
        lines = {p: [b[kind][p] for b in batches] for p in ("p50", "p90", "p99")}
        curves(axes, title, [b["batch_size"] for b in batches], lines, "requests at once", "ms")
