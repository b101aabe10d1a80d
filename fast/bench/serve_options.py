"""The options of `twinfer bench serve`, and the loads they ask for."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from fast.bench.results import make_document, report
from fast.bench.serve import (
    LoadClient,
    LoadRequest,
    LoadResult,
    Objectives,
    as_row,
    closed_loop,
    draw_results,
    open_loop,
    print_results,
    read_requests,
    summarise,
    synthetic_requests,
)


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    """The server may be of any make, so no tier is asked for."""
    group = parser.add_argument_group("serve", "Load on a server that runs, of any make.")
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: http://127.0.0.1:8000)"
    )
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    group.add_argument(
        "--request-rate", type=float, nargs="+", metavar="R",
        help="open loop: requests a second; several give a row each (default: 1 2 4)",
    )  # fmt: skip
    group.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N", help="closed loop instead: clients at a time"
    )
    group.add_argument(
        "--num-prompts", type=int, default=64, metavar="N", help="requests of a load (default: 64)"
    )
    group.add_argument(
        "--load-seed", type=int, default=0, metavar="N", help="draws lengths and times (default: 0)"
    )
    group.add_argument(
        "--input",
        type=Path,
        metavar="FILE.jsonl",
        help="prompts and max_tokens, one a line; every load has the same",
    )
    group.add_argument(
        "--extra-body",
        metavar="JSON",
        help="""fields added to each request, such as '{"ignore_eos": true}'""",
    )
    for name, text in (
        ("ttft", "time to first token"),
        ("itl", "mean between tokens"),
        ("e2e", "whole answer"),
    ):
        group.add_argument(f"--slo-{name}", type=float, metavar="MS", help=f"objective for goodput: {text}")


def run(arguments: argparse.Namespace) -> int:
    """Run the loads one after the other. Returns 0, or 1 when a request failed.

    Raises:
        ValueError: an option is not acceptable, or no server answers.
    """
    _check(arguments)
    extra = _extra_body(arguments.extra_body)
    client = LoadClient(arguments.base_url, arguments.api_key, extra)
    objectives = Objectives(arguments.slo_ttft, arguments.slo_itl, arguments.slo_e2e)
    seed = arguments.load_seed
    rates = arguments.request_rate or ([] if arguments.concurrency else [1.0, 2.0, 4.0])
    limits = [*(arguments.concurrency or ()), *rates]  # clients, or requests a second
    loads = [_requests(arguments, client, number) for number in range(len(limits) + 1)]
    client.send(loads.pop()[0], time.perf_counter())  # the first one pays for what is made on first use
    results: list[LoadResult] = []
    for limit, requests in zip(limits, loads, strict=True):
        if arguments.concurrency:
            name, samples = f"{limit} clients", closed_loop(client, requests, int(limit))
        else:
            name, samples = f"{limit:g} requests/s", open_loop(client, requests, limit, seed)
        results.append(summarise(name, samples, objectives))
    document = make_document("serve", model=client.model, seed=seed, loads=[as_row(r) for r in results])
    report(
        arguments, document, lambda: print_results(document), lambda figure: draw_results(document, figure)
    )
    return 1 if any(result.failed for result in results) else 0


def _requests(arguments: argparse.Namespace, client: LoadClient, load: int) -> list[LoadRequest]:
    """Those of a file are the same for every load: the prefix cache has them after the first."""
    if arguments.input is not None:
        return read_requests(arguments.input, arguments.num_prompts)
    return synthetic_requests(arguments.num_prompts, arguments.load_seed, client.max_model_len, load)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.request_rate and arguments.concurrency:
        raise ValueError("Give --request-rate (open loop) or --concurrency (closed loop), not both.")
    for name in ("request_rate", "concurrency"):
        if any(value <= 0 for value in getattr(arguments, name) or ()):
            raise ValueError(f"--{name.replace('_', '-')} must be above 0.")
    if arguments.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {arguments.num_prompts}.")


def _extra_body(text: str | None) -> dict[str, object]:
    try:
        extra = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"--extra-body is no JSON ({error}).") from error
    if not isinstance(extra, dict):
        raise ValueError("--extra-body must be a JSON object.")
    return extra
