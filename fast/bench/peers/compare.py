"""`twinfer bench peers`: other engines on the same workloads, turn by turn with this one in the same minutes.

All engines stay loaded; a round gives each workload to one after the other, so that whatever else the machine does
falls on all of them. A turn begins when the engine before it no longer keeps a core busy. Round 0 has the seeded
tokens, later ones the same lengths in other tokens: a prefix cache starts cold every time. Every request generates
exactly as many tokens as were asked for. An engine that cannot be installed, or fails, is a sentence below the table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fast.bench.engines import median
from fast.bench.peers.catalogue import OURS, PEERS, Peer
from fast.bench.peers.process import PeerError, PeerProcess
from fast.bench.plots import bars
from fast.bench.results import Document, make_document, print_table, report
from fast.bench.startup import PROMPT_TOKENS, start_to_first_token
from fast.bench.workloads import BenchWorkload, draw_tokens, make_workload
from fast.cores import available_cores
from reference.frontend.checkpoint import model_folder, read_model_config
from reference.frontend.engine_args import DEFAULT_MODEL
from reference.frontend.model_store import resolve_model

WORKLOADS = ("uniform", "mixed", "prefix")
QUICK_SIZES = {"uniform": 1, "mixed": 8, "prefix": 4}
NEIGHBOUR_ROUNDS = 3
# An engine may go on spinning for seconds after its last answer (vLLM does): the next turn waits until all are calm.
SETTLE_S = 15.0
LOOK_S = 0.25
CALM = 0.1  # of a core, all engines together


@dataclass
class Entry:
    """What is known of one engine. Rates are generated tokens a second, one a round."""

    peer: Peer
    process: PeerProcess | None = None
    about: dict[str, Any] = field(default_factory=dict)  # configuration, versions
    start_s: float | None = None
    peak_memory: int | None = None
    quiet: dict[str, list[float]] = field(default_factory=dict)
    beside_neighbour: dict[str, list[float]] = field(default_factory=dict)
    error: str | None = None

    def fail(self, error: PeerError) -> None:
        self.error = str(error)
        if self.process is not None:
            self.process.close()
            self.process = None


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    names = [peer.name for peer in PEERS]
    parser.add_argument(
        "--peers", nargs="+", choices=names, default=names, metavar="NAME",
        help=f"of {', '.join(names)} (default: all; {OURS} always takes part)",
    )  # fmt: skip
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME",
        help=f"of {', '.join(WORKLOADS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="MODEL", help=f"(default: {DEFAULT_MODEL})")
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds (default: 5, with --quick 1)")
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests: does it run, and roughly how fast"
    )
    parser.add_argument(
        "--neighbour",
        action="store_true",
        help="then again beside a process that burns one core: what is kept",
    )
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="seconds one answer may take (default: 900)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.repeat is not None and arguments.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {arguments.repeat}.")
    if arguments.timeout <= 0:
        raise ValueError(f"--timeout must be above 0, got {arguments.timeout:g}.")
    model = resolve_model(arguments.model)
    vocab_size = read_model_config(model_folder(model)).vocab_size
    sizes = QUICK_SIZES if arguments.quick else dict.fromkeys(WORKLOADS)
    workloads = [make_workload(name, sizes[name], vocab_size=vocab_size) for name in arguments.workload]
    rounds = arguments.repeat or (1 if arguments.quick else 5)
    chosen = [peer for peer in PEERS if peer.name in arguments.peers or peer.name == OURS]
    entries = compare(chosen, model, workloads, vocab_size, rounds, arguments.neighbour, arguments.timeout)
    document = make_document(
        "peers",
        rounds=rounds,
        workloads={w.name: _describe(w) for w in workloads},
        engines={entry.peer.name: _figures(entry) for entry in entries},
    )
    report(arguments, document, lambda: print_comparison(document), lambda figure: _draw(document, figure))
    return 0


def compare(
    peers: Sequence[Peer],
    model: Path,
    workloads: Sequence[BenchWorkload],
    vocab_size: int,
    rounds: int,
    neighbour: bool = False,
    timeout: float = 900.0,
) -> list[Entry]:
    """Run `workloads` on all `peers`, `rounds` times, and again beside a neighbour if asked for."""
    entries = [Entry(peer) for peer in peers]
    prompt = draw_tokens(PROMPT_TOKENS, 0, vocab_size)
    with ExitStack() as stack:
        for entry in entries:
            _say(f"starting {entry.peer.name}")
            _start(entry, model, prompt, timeout)
            stack.callback(_stop, entry)
        for number in range(rounds):
            _round(entries, [w.with_other_tokens(number, vocab_size) for w in workloads], number, "quiet")
        if neighbour:
            with burning_core():
                for number in range(rounds, rounds + min(rounds, NEIGHBOUR_ROUNDS)):
                    changed = [w.with_other_tokens(number, vocab_size) for w in workloads]
                    _round(entries, changed, number, "beside_neighbour")
        for entry in entries:
            if entry.process is not None:
                entry.peak_memory = entry.process.peak_memory()
    return entries


def _start(entry: Entry, model: Path, prompt: tuple[int, ...], timeout: float) -> None:
    try:
        entry.process, form = entry.peer.start(model, available_cores(), timeout)
        entry.start_s, _, entry.about = start_to_first_token(entry.process, form, prompt)
    except PeerError as error:
        entry.fail(error)


def _stop(entry: Entry) -> None:
    if entry.process is not None:
        entry.process.close()


def _round(entries: Sequence[Entry], workloads: Sequence[BenchWorkload], number: int, kind: str) -> None:
    for workload in workloads:
        for entry in entries:
            if entry.process is None:
                continue
            _say(f"round {number}, {workload.name}, {entry.peer.name}")
            settle([other.process for other in entries if other.process is not None])
            try:
                seconds = entry.process.run((r.token_ids, r.max_tokens) for r in workload.requests)
            except PeerError as error:
                entry.fail(error)
            else:
                rates: dict[str, list[float]] = getattr(entry, kind)
                rates.setdefault(workload.name, []).append(workload.num_output_tokens / seconds)


def settle(processes: Sequence[PeerProcess], patience: float = SETTLE_S) -> bool:
    """Wait until these do next to nothing, at most `patience` seconds; whether they do."""
    deadline = time.monotonic() + patience
    used = sum(process.cpu_seconds() for process in processes)
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        before, used = used, sum(process.cpu_seconds() for process in processes)
        if used - before < CALM * LOOK_S:
            return True
    return False


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr)


@contextmanager
def burning_core() -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps one of the cores busy, the last that this one may use."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        yield process
    finally:
        process.kill()
        process.wait()


def _describe(workload: BenchWorkload) -> dict[str, int]:
    return {
        "requests": len(workload.requests),
        "prompt_tokens": sum(len(request.token_ids) for request in workload.requests),
        "output_tokens": workload.num_output_tokens,
    }


def _figures(entry: Entry) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "weights": entry.peer.weights,
        **entry.about,
        "start_to_first_token_s": entry.start_s,
        "peak_memory_bytes": entry.peak_memory,
        "error": entry.error,
        "tokens_per_s": {name: median(rates) for name, rates in entry.quiet.items()},
        "tokens_per_s_runs": entry.quiet,
    }
    if entry.beside_neighbour:
        figures["kept_beside_neighbour"] = {
            name: median(rates) / median(entry.quiet[name]) for name, rates in entry.beside_neighbour.items()
        }
    return figures


def print_comparison(document: Document) -> None:
    """The table, configurations and failures below it."""
    engines, workloads = document["engines"], document["workloads"]
    neighbour = any("kept_beside_neighbour" in engine for engine in engines.values())
    headings = ["engine", "weights", *workloads, *(["kept"] if neighbour else []), "start, s", "GB"]
    rows = []
    for name, engine in engines.items():
        cells = [_cell(engine, engines[OURS], workload) for workload in workloads]
        kept = engine.get("kept_beside_neighbour", {}).values()
        cells += [" ".join(f"{share:.0%}" for share in kept)] if neighbour else []
        start, memory = engine["start_to_first_token_s"], engine["peak_memory_bytes"]
        cells += ["" if start is None else f"{start:.1f}", "" if memory is None else f"{memory / 1e9:.2f}"]
        rows.append([name, engine["weights"], *cells])
    notes = [
        f"{name}: {engine['configuration']}"
        + "".join(f", {package} {version}" for package, version in engine["versions"].items())
        for name, engine in engines.items()
        if "configuration" in engine
    ]
    notes += [f"{name}: {engine['error']}." for name, engine in engines.items() if engine["error"]]
    title = f"Generated tokens/s (ours / it), medians of {document['rounds']} rounds"
    print_table(title, headings, rows, notes)


def _cell(engine: dict[str, Any], ours: dict[str, Any], workload: str) -> str:
    rate = engine["tokens_per_s"].get(workload)
    if rate is None:
        return "-"
    own = ours["tokens_per_s"].get(workload)
    return f"{rate:.1f}" if engine is ours or own is None else f"{rate:.1f} ({own / rate:.2f})"


def _draw(document: Document, figure: Any) -> None:
    workloads = document["workloads"]
    for axes, workload in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        rates = {
            name: engine["tokens_per_s"][workload]
            for name, engine in document["engines"].items()
            if workload in engine["tokens_per_s"]
        }
        bars(axes, workload, list(rates), list(rates.values()), "generated tokens/s")
