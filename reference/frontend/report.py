"""A comparison of two tiers, printed for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from reference.frontend.diff import DiffReport, Divergence


def print_diff(report: DiffReport) -> None:
    """The first difference, if there is one, then what was compared."""
    console = Console(highlight=False, soft_wrap=True)
    for divergence in report.excused:
        console.print("excused, a tie within float32 rounding:", style="yellow")
        _print_divergence(console, report, divergence)
    if report.divergence is not None:
        console.print("first difference:", style="bold red")
        _print_divergence(console, report, report.divergence)
    table = Table(show_header=True, header_style="bold")
    for heading in ("steps", "tokens", "preemptions", "cached tokens", "finished", "excused"):
        table.add_column(heading, justify="right")
    counts = (
        report.num_steps,
        report.num_tokens,
        report.num_preemptions,
        report.num_cached_tokens,
        report.num_finished,
        len(report.excused),
    )
    table.add_row(*map(str, counts))
    console.print(table)
    first, second = report.tier_names
    if report.is_equal:
        console.print(f"{first} and {second} are equal.", style="bold green")
    else:
        console.print(f"{first} and {second} differ.", style="bold red")


def _print_divergence(console: Console, report: DiffReport, divergence: Divergence) -> None:
    console.print(f"  step          {divergence.step}", markup=False)
    if divergence.request_id is not None:
        console.print(f"  request       {divergence.request_id}", markup=False)
    console.print(f"  what          {divergence.what}", markup=False)
    for name, value, table in zip(report.tier_names, divergence.values, divergence.block_tables, strict=True):
        console.print(f"  {name:13} {value!r}", markup=False)
        if divergence.request_id is not None:
            console.print(f"  {'':13} block table {list(table)}", markup=False)
    if divergence.decision is not None:
        console.print(f"  logit gap     {divergence.decision.logit_gap:.3g}", markup=False)
        console.print(f"  margin        {divergence.decision.margin:.3g}", markup=False)
