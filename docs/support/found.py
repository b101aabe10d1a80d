"""What finds which of the planted bugs of tests/simt/planted_bugs.cu: docs/races.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from docs.support.native import run
from docs.support.source import ROOT

SEEDS = ("0", "1", "2", "3")


@dataclass(frozen=True)
class Race:
    """A planted race."""

    name: str
    wrong: int  # of the seeds, those on which an ordinary build computes wrong values or stops with an error
    report: str  # ThreadSanitizer's
    marked: Sequence[int]  # lines that the report has to name

    @property
    def named(self) -> Sequence[int]:
        """Those of the marked lines that it does name."""
        return [line for line in self.marked if f"planted_bugs.cu:{line} " in self.report]


@cache
def race(name: str) -> Race:
    """Run a bug in an ordinary build with several orders of threads, and once under race detection."""
    wrong = sum(run("planted_bugs", name, "bug", seed, how="plain").returncode != 0 for seed in SEEDS)
    report = run("planted_bugs", name, "bug", "0", how="tsan").stderr
    text = (ROOT / "tests" / "simt" / "planted_bugs.cu").read_text(encoding="utf-8")
    marked = [number for number, line in enumerate(text.splitlines(), 1) if f"AT({name})" in line]
    return Race(name, wrong, report, marked)


def shortened(report: str) -> str:
    """The first race of a report: who did what, where, without the frames of the emulator and the library."""
    first = report.split("==================")[1].partition("  Location is")[0].partition("  As if")[0]
    kept = []
    for line in first.splitlines():
        if re.match(r"\s+#\d+ ", line):
            if "planted_bugs.cu:" in line:
                kept.append(re.sub(r" \(planted_bugs-tsan.*", "", line))
        elif re.search(r"(WARNING|Write|Read|Previous|Atomic)", line):
            kept.append(re.sub(r" \(pid=\d+\)", "", line))
    return "\n".join(kept)
