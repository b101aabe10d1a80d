"""Options that benchmarks of a whole engine share, and the engine they ask for."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from fast.bench.workloads import DEFAULT_SIZES, BenchWorkload, make_workload
from reference.contracts.config import cdiv
from reference.frontend.cli_options import ENGINE, add_engine_options, add_tier_option, given
from reference.frontend.engine_args import EngineArgs


def add_run_options(
    parser: argparse.ArgumentParser, tier: str | None, workloads: Sequence[str] = (), repeat: int = 3
) -> None:
    """Which engine, which workloads and how often. Without `workloads` the benchmark has its own."""
    group = parser.add_argument_group("runs")
    if workloads:
        group.add_argument(
            "--workload", nargs="+", choices=tuple(DEFAULT_SIZES), default=list(workloads), metavar="NAME",
            help=f"of {', '.join(DEFAULT_SIZES)} (default: {' '.join(workloads)})",
        )  # fmt: skip
    group.add_argument(
        "--num-requests", type=int, metavar="N", help="requests of a workload (default: each has its own)"
    )
    group.add_argument("--workload-seed", type=int, default=0, metavar="N", help="draws them (default: 0)")
    group.add_argument(
        "--repeat", type=int, default=repeat, metavar="N", help=f"runs; the median counts (default: {repeat})"
    )
    add_tier_option(parser, tier)
    add_engine_options(parser)


def check_run_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError: a number is out of range."""
    if arguments.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {arguments.repeat}.")
    if arguments.num_requests is not None and arguments.num_requests < 1:
        raise ValueError(f"--num-requests must be at least 1, got {arguments.num_requests}.")


def engine_args(arguments: argparse.Namespace, **changes: Any) -> EngineArgs:
    """The engine that was asked for; `changes` win."""
    return EngineArgs(**{**given(arguments, ENGINE), **changes})


def workload_of(
    arguments: argparse.Namespace, name: str, vocab_size: int, size: int | None = None
) -> BenchWorkload:
    """The workload of that name; `size` unless `--num-requests` says otherwise."""
    size = arguments.num_requests if arguments.num_requests is not None else size
    return make_workload(name, size, arguments.workload_seed, vocab_size)


def blocks_for(workload: BenchWorkload, max_num_seqs: int, block_size: int) -> int:
    """A pool in which `max_num_seqs` requests of this workload never run short, the null block included."""
    longest = sorted((len(r.token_ids) + r.max_tokens for r in workload.requests), reverse=True)
    return 1 + sum(cdiv(tokens, block_size) for tokens in longest[:max_num_seqs])


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
