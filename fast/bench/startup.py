"""`twinfer bench startup`: from the start of the process to the first token of a prompt of 20, and peak memory.

Python, imports and loading count. The first run may find its files on the disk only, so it stands apart.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fast.bench.engines import median
from fast.bench.peers.process import CHILDREN, PeerProcess
from fast.bench.plots import bars
from fast.bench.results import Document, make_document, print_table, report
from fast.bench.workloads import draw_tokens
from fast.cores import available_cores
from reference.frontend.checkpoint import model_folder, read_model_config
from reference.frontend.cli_options import add_tier_option
from reference.frontend.engine_args import DEFAULT_MODEL
from reference.frontend.model_store import resolve_model
from reference.frontend.tiers import available_tiers, load_tier

PROMPT_TOKENS = 20


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="MODEL", help=f"(default: {DEFAULT_MODEL})")
    parser.add_argument(
        "--repeat",
        type=int,
        default=3,
        metavar="N",
        help="runs after the first; the median counts (default: 3)",
    )
    add_tier_option(parser, tier)


def run(arguments: argparse.Namespace) -> int:
    if arguments.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {arguments.repeat}.")
    names = [arguments.tier] if arguments.tier is not None else available_tiers()
    for name in names:
        reason = load_tier(name).why_unavailable()
        if reason is not None:
            raise ValueError(reason)
    model = resolve_model(arguments.model)
    rows = {name: measure(name, model, arguments.repeat) for name in names}
    document = make_document("startup", prompt_tokens=PROMPT_TOKENS, tiers=rows)
    report(arguments, document, lambda: _print(document), lambda figure: _draw(document, figure))
    return 0


def measure(tier: str, model: Path, repeat: int) -> dict[str, Any]:
    """Seconds of the first run, the median of `repeat` more, and the most memory of all, in bytes.

    Raises:
        ValueError: the process failed.
    """
    vocab_size = read_model_config(model_folder(model)).vocab_size
    prompt = draw_tokens(PROMPT_TOKENS, 0, vocab_size)
    command = [sys.executable, str(CHILDREN / "run_ours.py"), tier]
    seconds, memory = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeat + 1):
            with PeerProcess(command, Path(folder) / "log") as process:
                taken, peak, _ = start_to_first_token(process, model, prompt)
            seconds.append(taken)
            memory.append(peak or 0)
    return {"first_run_s": seconds[0], "seconds": median(seconds[1:]), "peak_memory_bytes": max(memory)}


def start_to_first_token(
    process: PeerProcess, model: Path, prompt: tuple[int, ...]
) -> tuple[float, int | None, dict[str, Any]]:
    """(seconds since the process was started, its peak memory in bytes, what it says of itself) at the first token."""
    about = process.load(model, available_cores())
    process.run([(prompt, 1)])
    return time.perf_counter() - process.started, process.peak_memory(), about


def _print(document: Document) -> None:
    rows = [
        [name, f"{r['seconds']:.2f}", f"{r['first_run_s']:.2f}", f"{r['peak_memory_bytes'] / 1e6:,.0f}"]
        for name, r in document["tiers"].items()
    ]
    print_table(
        f"Process start to first token, {PROMPT_TOKENS} prompt tokens",
        ["tier", "seconds", "first run", "peak memory, MB"],
        rows,
    )


def _draw(document: Document, figure: Any) -> None:
    time_axes, memory_axes = figure.subplots(1, 2)
    tiers = document["tiers"]
    bars(time_axes, "Process start to first token", list(tiers), [r["seconds"] for r in tiers.values()], "s")
    memory = [r["peak_memory_bytes"] / 1e6 for r in tiers.values()]
    bars(memory_axes, "Peak memory", list(tiers), memory, "MB")
