"""A comparison of two tiers, printed for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reference.frontend.diff import DiffReport, Divergence

_WHOLE = 24  # a list of at most so many entries is shown whole
_AROUND = 4  # of a longer one, so many entries before and after the first difference


def print_diff(report: DiffReport) -> None:
    """The excused differences, the first that is not, and what was compared."""
    console = Console(highlight=False, soft_wrap=True)
    for divergence in report.excused:
        console.print("Excused, a tie within float32 rounding:", style="yellow")
        _print_divergence(console, report, divergence)
    if report.divergence is not None:
        console.print("First difference:", style="bold red")
        _print_divergence(console, report, report.divergence)
    counts = {
        "steps": report.num_steps,
        "tokens": report.num_tokens,
        "preemptions": report.num_preemptions,
        "swapped": report.num_swapped_blocks,
        "copied": report.num_block_copies,
        "drafts": report.num_accepted_drafts,
        "cached": report.num_cached_tokens,
        "finished": report.num_finished,
        "errors": report.num_errors,
        "excused": len(report.excused),
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in counts:
        table.add_column(heading, justify="right")
    table.add_row(*map(str, counts.values()))
    Console(highlight=False).print(table)
    first, second = report.tier_names
    if report.is_equal:
        console.print(f"{first} and {second} are equal.", style="bold green")
    else:
        console.print(f"{first} and {second} differ.", style="bold red")


def _print_divergence(console: Console, report: DiffReport, divergence: Divergence) -> None:
    rows: list[tuple[str, object]] = [("step", divergence.step)]
    if divergence.request_id is not None:
        rows.append(("request", divergence.request_id))
    rows.append(("what", divergence.what))
    rows += zip(report.tier_names, excerpts(*divergence.values), strict=True)
    if divergence.request_id is not None:
        for name, block_table in zip(report.tier_names, divergence.block_tables, strict=True):
            rows.append((f"block table, {name}", " ".join(map(str, block_table)) or "none"))
    if divergence.decision is not None:
        rows.append(("logit gap", f"{divergence.decision.logit_gap:.3g}"))
        rows.append(("margin", f"{divergence.decision.margin:.3g}"))
    for label, value in rows:
        console.print(Text(f"  {label:22} {value}"))


def excerpts(first: Any, second: Any) -> tuple[str, str]:
    """Two values as text; of long lists and tables, the entries around the first difference."""
    values = [list(value.items()) if isinstance(value, dict) else value for value in (first, second)]
    if not all(isinstance(value, list | tuple) for value in values) or max(map(len, values)) <= _WHOLE:
        return repr(values[0]), repr(values[1])
    pairs = enumerate(zip(*values, strict=False))
    differing = next((i for i, (a, b) in pairs if a != b), min(map(len, values)))
    return _around(values[0], differing), _around(values[1], differing)


def _around(values: Sequence[Any], index: int) -> str:
    start, end = max(0, index - _AROUND), min(len(values), index + _AROUND + 1)
    window = ", ".join(map(repr, values[start:end]))
    before, after = ("... " if start else ""), (" ..." if end < len(values) else "")
    return f"[{before}{window}{after}] (entries {start} to {end - 1} of {len(values)})"
