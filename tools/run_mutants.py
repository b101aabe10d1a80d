"""Plant every bug of `tests/mutants`, and see the tests named for it fail: `python tools/run_mutants.py [NAME...]`.

Each mutant and tier is a pytest process of its own. Before that, all named tests must pass without any mutant. The exit
status is 1 when a mutant survives that should not, or the other way round, or when a test fails that should pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.mutants import MUTANTS, Mutant  # noqa: E402
from tools.run_tests import environment  # noqa: E402

# What a test says when it notices something. Any other exception is the mutant's own, or a crash that tells nobody why.
ASSERTIONS = ("AssertionError", "Failed")
Outcomes = dict[str, list[str | None]]  # see tests/mutants/plugin.py


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    tier_name: str
    seconds: float
    outcomes: Outcomes
    closing: str  # pytest's last line

    @property
    def survived(self) -> list[str]:
        """Named tests that did not fail, each as named."""
        return [name for name in self.mutant.killed_by if not any(self._errors(name))]

    @property
    def crashes(self) -> list[str]:
        """Exceptions that were no assertion, of tests in which no case failed by one."""
        crashes = []
        for name in self.mutant.killed_by:
            errors = [error for error in self._errors(name) if error is not None]
            if errors and not any(error in ASSERTIONS for error in errors):
                crashes.append(errors[0])
        return crashes

    def _errors(self, name: str) -> list[str | None]:
        """Of the cases of a test, or of all tests of a file."""
        return [
            error
            for test, errors in self.outcomes.items()
            if test.startswith(f"tests/{name}")
            for error in errors
        ]

    @property
    def is_as_expected(self) -> bool:
        if not self.outcomes or self.crashes:
            return False
        killed = not self.survived
        return len(self.survived) == len(self.mutant.killed_by) if self.mutant.changes_nothing else killed

    @property
    def verdict(self) -> str:
        if not self.outcomes:
            return f"no test was run: {self.closing}"
        if self.crashes:
            return f"crashed: {', '.join(self.crashes)}"
        if self.mutant.changes_nothing:
            return "survived, as expected" if self.is_as_expected else "killed, but it changes nothing"
        if self.survived:
            return f"SURVIVED {', '.join(map(short, self.survived))}"
        return ", ".join(map(short, self.mutant.killed_by))


def short(name: str) -> str:
    return name.rpartition("::")[2]


def run_pytest(arguments: Sequence[str], names: Sequence[str]) -> tuple[Outcomes, str]:
    """Run tests with the plugin; returns the errors of each test, and pytest's last line."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.mutants.plugin",
            "-p",
            "no:cacheprovider",
            "-q",
        ]
        command += ["--mutant-report", str(report), *arguments, *(f"tests/{name}" for name in names)]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        outcomes = json.loads(report.read_text()) if report.exists() else {}
    return outcomes, lines[-1]


def run_mutant(case: tuple[Mutant, str]) -> Result:
    mutant, tier_name = case
    start = time.perf_counter()
    arguments = ["--mutant", mutant.name, "--mutant-tier", tier_name]
    outcomes, closing = run_pytest(arguments, mutant.killed_by)
    return Result(mutant, tier_name, time.perf_counter() - start, outcomes, closing)


def tests_pass_without_mutants(mutants: Sequence[Mutant]) -> bool:
    names = list(dict.fromkeys(name for mutant in mutants for name in mutant.killed_by))
    outcomes, closing = run_pytest([], names)
    broken = [test for test, errors in outcomes.items() if any(errors)]
    unknown = [name for name in names if not any(test.startswith(f"tests/{name}") for test in outcomes)]
    print(f"Without a mutant: {closing}", flush=True)
    if not outcomes:
        return False
    for problem, tests in (("fails", broken), ("does not exist", unknown)):
        for test in tests:
            print(f"{test} {problem} without any mutant; it cannot judge one.")
    return not broken and not unknown


def show(result: Result) -> None:
    mark = " " if result.is_as_expected else "!"
    print(
        f"{mark} {result.mutant.name:<37} {result.tier_name:<9} {result.seconds:6.1f} s  {result.verdict}",
        flush=True,
    )


def report(results: list[Result]) -> bool:
    """Print the closing line. True when every mutant behaved as expected."""
    bugs = [each for each in results if not each.mutant.changes_nothing]
    equals = [each for each in results if each.mutant.changes_nothing]
    killed, survived = (sum(each.is_as_expected for each in part) for part in (bugs, equals))
    rest = f", {survived} of {len(equals)} survived as expected" if equals else ""
    print(f"\n{killed} of {len(bugs)} killed{rest}", flush=True)
    return killed == len(bugs) and survived == len(equals)


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in MUTANTS]:
        print(
            f"error: no mutant called {', '.join(unknown)}; there are {', '.join(MUTANTS)}", file=sys.stderr
        )
        return 2
    chosen = [MUTANTS[name] for name in names or MUTANTS]
    if not tests_pass_without_mutants(chosen):
        return 1
    cases = [(each, tier_name) for each in chosen for tier_name in each.tiers]
    results = []
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        for result in executor.map(run_mutant, cases):
            show(result)
            results.append(result)
    return 0 if report(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
