"""Count lines of code against the budgets of the reference tier. Exit status 1 when one is exceeded.

Only lines that carry code count: comments, blank lines and docstrings are free, so that no budget is ever a reason to
explain less. A file over its budget asks "is this two ideas?"; the answer is never to write more tersely.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


@dataclass(frozen=True)
class Group:
    """Files that share a budget; None means that there is none."""

    title: str
    folder: str
    exclude: tuple[str, ...] = ()
    total_budget: int | None = None
    file_budget: int | None = None

    def files(self) -> list[Path]:
        excluded = [ROOT / folder for folder in self.exclude]
        return [
            path
            for path in sorted((ROOT / self.folder).rglob("*.py"))
            if not any(folder in path.parents for folder in excluded)
        ]


GROUPS = (
    Group(
        "reference, the engine",
        "reference",
        ("reference/contracts", "reference/frontend"),
        total_budget=2600,
        file_budget=250,
    ),
    # The trace and the sampling rules are vocabulary too: both tiers must mean the same by them.
    Group("reference/contracts", "reference/contracts", total_budget=1300),
    Group("reference/frontend", "reference/frontend", file_budget=400),
    Group("fast", "fast"),
    Group("app", "app"),
)


def docstring_lines(tree: ast.AST) -> set[int]:
    """Line numbers of all strings that stand as a statement: docstrings, those below an attribute included."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def count_code_lines(source: str) -> int:
    """Lines that carry at least one token of code. Raises SyntaxError when the source is not Python."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def over(count: int, budget: int | None) -> bool:
    return budget is not None and count > budget


def add_row(table: Table, name: str, count: int, budget: int | None, style: str | None = None) -> None:
    left = "" if budget is None else str(budget - count)
    table.add_row(
        name,
        str(count),
        "" if budget is None else str(budget),
        left,
        style="bold red" if over(count, budget) else style,
    )


def main() -> int:
    table = Table("file", "lines", "budget", "left", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    exceeded = []
    for group in GROUPS:
        counts = {
            str(path.relative_to(ROOT)): count_code_lines(path.read_text(encoding="utf-8"))
            for path in group.files()
        }
        total = sum(counts.values())
        for name, count in counts.items():
            add_row(table, f"  {name}", count, group.file_budget)
        add_row(table, group.title, total, group.total_budget, style="bold")
        table.add_row()
        exceeded += [name for name, count in counts.items() if over(count, group.file_budget)]
        exceeded += [group.title] if over(total, group.total_budget) else []
    Console().print(table)
    if exceeded:
        print(f"over budget: {', '.join(exceeded)}. Is this two ideas?", file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
