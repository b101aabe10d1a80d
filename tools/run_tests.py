"""Run the checks and every test suite, and sum them up: `python tools/run_tests.py [SUITE...]`.

A suite is a folder of tests/; `races` runs only when it is named. All run even when one fails; the exit status is 1
when any did. The closing lines repeat what pytest said of each suite, and the last one adds everything up.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LINT = ("ruff check .", "ruff format --check .", "mypy")
# Cheap and fundamental suites first: when a spec fails, the differences between tiers only echo it.
ORDER = ("spec", "kernels", "simt", "oracle", "differential", "property", "packaging")
# The code on the pages of the tutorial is tested as well. In the order of the files: what needs the built site twice
# stands last, or both workers would wait for it first.
EXTRA = {"docs": ("docs", "--markdown-docs", "--no-loadscope-reorder")}
# Minutes of work that few changes can break: they run when they are named (`make test-races`).
ON_REQUEST = {"races"}
MAX_WORKERS = 4
ANSI = re.compile(r"\x1b\[[0-9;]*m")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed)\b")


@dataclass(frozen=True)
class SuiteResult:
    name: str
    seconds: float
    passed: int
    failed: int
    skipped: int
    closing: str  # what the tool itself said last


def find_suites() -> list[str]:
    """Names of the folders of tests/ that hold tests, in the order in which they run."""
    names = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    return [name for name in ORDER if name in names] + sorted(names.difference(ORDER))


def environment() -> dict[str, str]:
    """One thread for each process: the workers already fill the cores, and more threads would fight over them."""
    pinned = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return os.environ | pinned | {"PATH": path, "TOKENIZERS_PARALLELISM": "false"}


def run_echoing(command: list[str]) -> tuple[int, str]:
    """Run a command, show its output as it comes, and return its exit status and its last line."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    tail = b""
    while chunk := os.read(process.stdout.fileno(), 65536):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        tail = (tail + chunk)[-4096:]
    lines = ANSI.sub("", tail.decode(errors="replace")).split("\n")
    closing = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return process.wait(), closing


def run_lint() -> SuiteResult:
    start = time.perf_counter()
    failed = []
    for command in LINT:
        print(f"\n$ {command}", flush=True)
        status, _ = run_echoing([sys.executable, "-m", *command.split()])
        if status:
            failed.append(command)
    closing = f"failed: {', '.join(failed)}" if failed else "ruff and mypy have nothing to say"
    return SuiteResult("lint", time.perf_counter() - start, len(LINT) - len(failed), len(failed), 0, closing)


def run_suite(name: str) -> SuiteResult:
    start = time.perf_counter()
    print(f"\n$ pytest tests/{name}", flush=True)
    workers = min(MAX_WORKERS, os.cpu_count() or 1)
    color = "yes" if sys.stdout.isatty() else "no"
    command = [
        "pytest",
        f"tests/{name}",
        *EXTRA.get(name, ()),
        "-n",
        str(workers),
        "--dist",
        "loadgroup",
        f"--color={color}",
    ]
    status, closing = run_echoing([sys.executable, "-m", *command])
    counts = {kind.rstrip("s"): int(number) for number, kind in COUNT.findall(closing)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if status and not failed:
        # A crash, an interrupt, or no test collected at all (exit status 5): none of them may pass for green.
        failed, closing = 1, f"pytest ended with exit status {status}: {closing}"
    skipped = counts.get("skipped", 0) + counts.get("xfailed", 0)
    seconds = time.perf_counter() - start
    return SuiteResult(name, seconds, counts.get("passed", 0), failed, skipped, closing.strip("= "))


def report(results: list[SuiteResult]) -> bool:
    """Print the table and the closing line. True when nothing failed."""
    table = Table("suite", "seconds", "result", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for result in results:
        style = "red" if result.failed else None
        table.add_row(result.name, f"{result.seconds:.1f}", result.closing, style=style)
    print(flush=True)
    Console(soft_wrap=True).print(table)
    passed = sum(result.passed for result in results)
    failed = sum(result.failed for result in results)
    skipped = sum(result.skipped for result in results)
    print(f"\n{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""), flush=True)
    return failed == 0


def main(names: list[str]) -> int:
    known = ["lint", *find_suites()]
    if unknown := [name for name in names if name not in known]:
        print(f"error: no suite called {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = [name for name in known if name in names or (not names and name not in ON_REQUEST)]
    results = [run_lint() if name == "lint" else run_suite(name) for name in chosen]
    return 0 if report(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
