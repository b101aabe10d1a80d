"""The benchmarks by name: `twinfer bench NAME` (entry point `bench` of `twinfer.commands`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from fast.bench.results import add_output_options, check_output_options


@dataclass(frozen=True)
class Benchmark:
    """Module `fast.bench.<module>` has `add_options(parser, tier)` and `run(arguments) -> exit status`."""

    name: str
    module: str
    summary: str
    has_output_options: bool = True


BENCHMARKS = (
    Benchmark("throughput", "throughput", "tokens a second on seeded workloads"),
    Benchmark("latency", "latency", "time to first token and between tokens, by batch size"),
    Benchmark("startup", "startup", "process start to first token, and peak memory"),
    Benchmark("seqs", "seqs", "a sweep over max_num_seqs: throughput against latency"),
    Benchmark(
        "blocksize", "blocksize", "a sweep over block sizes: speed and waste; paged against contiguous memory"
    ),
    Benchmark("prefix", "prefix", "time to first token with and without a hit in the prefix cache"),
    Benchmark("roofline", "roofline", "what the machine allows, and the share of it that is reached"),
    Benchmark(
        "kernels",
        "kernels",
        "each rung of the CUDA kernels: what it moves (simt), how long it takes (cuda, cpu)",
    ),
    Benchmark("peers", "peers.compare", "other engines on the same workloads, turn by turn"),
    Benchmark(
        "scheduler", "scheduler", "the cost of a scheduling step, both tiers", has_output_options=False
    ),
    Benchmark("memory", "memory", "what sharing KV blocks saves", has_output_options=False),
    Benchmark(
        "serve", "serve_options", "load on an OpenAI-compatible server that runs", has_output_options=False
    ),
)


def add_benchmarks(parser: argparse.ArgumentParser, tier: str | None) -> None:
    """Add a subcommand for each benchmark. `tier` is the default of `--tier`."""
    names = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    for benchmark in BENCHMARKS:
        module = import_module(f"fast.bench.{benchmark.module}")
        subparser = names.add_parser(
            benchmark.name,
            prog=f"twinfer bench {benchmark.name}",
            help=benchmark.summary,
            description=f"{benchmark.summary[0].upper()}{benchmark.summary[1:]}.",
            allow_abbrev=False,
        )
        module.add_options(subparser, tier)
        if benchmark.has_output_options:
            add_output_options(subparser)
        subparser.set_defaults(benchmark=_checked(module.run) if benchmark.has_output_options else module.run)


def _checked(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """What cannot be saved is refused before minutes are spent on measuring it."""

    def checked(arguments: argparse.Namespace) -> int:
        check_output_options(arguments)
        return run(arguments)

    return checked
