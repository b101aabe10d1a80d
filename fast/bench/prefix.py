"""`twinfer bench prefix`: time to first token of a prompt whose beginning is in the prefix cache, and of one without.

Both prompts have the same length and 16 tokens of their own; only one of them was preceded by a request that shares the
rest with it.
"""

from __future__ import annotations

import argparse
from typing import Any

from fast.bench.engines import add_run_options, check_run_options, engine_args, median
from fast.bench.plots import curves
from fast.bench.results import Document, make_document, print_table, report
from fast.bench.runner import make_engine, run_workload
from fast.bench.workloads import BenchRequest, BenchWorkload, draw_tokens
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import pick_tier

LENGTHS = (128, 512, 1024, 2048)
OWN_TOKENS = 16


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N",
        help=f"tokens of the shared prefix (default: {' '.join(map(str, LENGTHS))})",
    )  # fmt: skip
    add_run_options(parser, tier)


def run(arguments: argparse.Namespace) -> int:
    check_run_options(arguments)
    if min(arguments.lengths) < 1:
        raise ValueError(f"--lengths must be at least 1, got {min(arguments.lengths)}.")
    args = engine_args(arguments)
    if not args.enable_prefix_caching:
        raise ValueError(
            "Without the prefix cache there is no hit to measure; leave --no-enable-prefix-caching out."
        )
    tier = pick_tier(arguments.tier)
    engine = make_engine(args, tier)
    rows = [
        measure(engine, length, arguments.repeat, arguments.workload_seed) for length in arguments.lengths
    ]
    document = make_document("prefix", tier=tier.name, prefixes=rows)
    report(arguments, document, lambda: _print(document), lambda figure: _draw(document, figure))
    return 0


def measure(engine: LLMEngine, length: int, repeat: int, seed: int) -> dict[str, Any]:
    """Medians of `repeat` pairs (miss, hit). Raises ValueError: the prompt does not fit the model."""
    misses, hits, cached = [], [], 0
    for number in range(repeat):
        rng_seed = seed * 1000 + number
        tokens = draw_tokens(length + 2 * OWN_TOKENS, rng_seed, engine.config.model.vocab_size)
        shared, own, other = tokens[:length], tokens[length:-OWN_TOKENS], tokens[-OWN_TOKENS:]
        # One after the other: the second wave finds in the cache what the first has left there.
        waves = ((BenchRequest(shared + own, 1),), (BenchRequest(shared + other, 1),))
        miss, hit = run_workload(engine, BenchWorkload("prefix", waves)).requests
        misses.append(1e3 * miss.ttft)
        hits.append(1e3 * hit.ttft)
        cached = hit.num_cached_tokens
    return {
        "prefix_tokens": length,
        "cached_tokens": cached,
        "miss_ttft_ms": median(misses),
        "hit_ttft_ms": median(hits),
    }


def _print(document: Document) -> None:
    rows = [
        [
            f"{r['prefix_tokens']:,}", f"{r['cached_tokens']:,}", f"{r['miss_ttft_ms']:.1f}", f"{r['hit_ttft_ms']:.1f}",
            f"{r['miss_ttft_ms'] / r['hit_ttft_ms']:.1f}",
        ]
        for r in document["prefixes"]
    ]  # fmt: skip
    print_table(
        f"Time to first token in ms, {document['tier']} tier, {OWN_TOKENS} own tokens after a shared prefix",
        ["prefix tokens", "from cache", "miss", "hit", "miss / hit"],
        rows,
    )


def _draw(document: Document, figure: Any) -> None:
    prefixes = document["prefixes"]
    lines = {name: [r[f"{name}_ttft_ms"] for r in prefixes] for name in ("miss", "hit")}
    x = [r["prefix_tokens"] for r in prefixes]
    curves(figure.subplots(), "Time to first token", x, lines, "tokens of the shared prefix", "ms")
