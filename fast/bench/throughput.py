"""`twinfer bench throughput`: generated tokens a second on seeded workloads, prompts included, prefix cache cold."""

from __future__ import annotations

import argparse
from typing import Any

from fast.bench.engines import add_run_options, check_run_options, engine_args, median, workload_of
from fast.bench.plots import bars
from fast.bench.results import Document, make_document, print_table, report
from fast.bench.runner import make_engine, run_workload
from fast.bench.workloads import BenchWorkload
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import pick_tier


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    add_run_options(parser, tier, workloads=("uniform", "mixed", "prefix"))


def run(arguments: argparse.Namespace) -> int:
    check_run_options(arguments)
    tier = pick_tier(arguments.tier)
    engine = make_engine(engine_args(arguments), tier)
    vocab_size = engine.config.model.vocab_size
    workloads = [workload_of(arguments, name, vocab_size) for name in arguments.workload]
    figures = {w.name: measure(engine, w, arguments.repeat) for w in workloads}
    document = make_document("throughput", tier=tier.name, workloads=figures)
    report(arguments, document, lambda: _print(document), lambda figure: _draw(document, figure))
    return 0


def measure(engine: LLMEngine, workload: BenchWorkload, repeat: int) -> dict[str, Any]:
    """Medians over `repeat` runs. Raises ValueError: see `run_workload`."""
    runs = [run_workload(engine, workload) for _ in range(repeat)]
    rates = [run.tokens_per_s for run in runs]
    first = runs[0]
    return {
        "requests": len(first.requests),
        "prompt_tokens": first.num_prompt_tokens,
        "cached_tokens": first.num_cached_tokens,
        "output_tokens": first.num_output_tokens,
        "steps": first.num_steps,
        "seconds": median([run.seconds for run in runs]),
        "tokens_per_s": median(rates),
        "tokens_per_s_runs": rates,
    }


def _print(document: Document) -> None:
    headings = ["workload", "requests", "in", "cached", "out", "steps", "seconds", "tokens/s", "range"]
    rows = [
        [
            name, str(w["requests"]), f"{w['prompt_tokens']:,}", f"{w['cached_tokens']:,}", f"{w['output_tokens']:,}",
            f"{w['steps']:,}", f"{w['seconds']:.2f}", f"{w['tokens_per_s']:.1f}",
            f"{min(w['tokens_per_s_runs']):.0f}-{max(w['tokens_per_s_runs']):.0f}",
        ]
        for name, w in document["workloads"].items()
    ]  # fmt: skip
    print_table(f"Throughput of {document['tier']}, time for the prompts included", headings, rows)


def _draw(document: Document, figure: Any) -> None:
    workloads = document["workloads"]
    rates = [w["tokens_per_s"] for w in workloads.values()]
    bars(
        figure.subplots(),
        f"Throughput, {document['tier']} tier",
        list(workloads),
        rates,
        "generated tokens/s",
    )
