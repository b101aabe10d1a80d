"""The full matrix of the CUDA kernels for sm_80 and sm_90, `make kernels-report`: `python -m tools.kernels_report`.

Registers, memory, occupancy and instructions of every instance, as tables and as kernels-report.json and .md in FOLDER.
Exit status 1 when a kernel breaks its budget (tests/kernels/budgets.toml).
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.cuda_toolkit import RELEASE, find_toolkit
from tools.kernel_budgets import Budgets, breaches, load_budgets
from tools.kernel_facts import TYPE_NAMES, CompileError, Kernel, compile_kernels
from tools.occupancy import MULTIPROCESSORS, Occupancy, occupancy

# Beside those that have a budget: shared memory, and what a spill looks like.
ALSO_COUNTED = ("LDS", "STS", "LDL", "STL")
LARGEST_BLOCK = 1024  # threads
WIDTH = 240  # of the printed tables, at most: a row stays one line also where the output goes to a file


@dataclass(frozen=True)
class Line:
    """One kernel of the report. `dynamic_bytes` of shared memory are what `context` tokens of the table take."""

    kernel: Kernel
    dynamic_bytes: int
    resident: Occupancy
    counts: dict[str, int]

    def to_json(self) -> dict[str, object]:
        kernel = self.kernel
        return {
            "kernel": kernel.name,
            "arguments": list(kernel.arguments),
            "architecture": kernel.architecture,
            "threads": kernel.threads,
            "registers": kernel.registers,
            "shared_bytes": kernel.shared_bytes,
            "dynamic_shared_bytes": self.dynamic_bytes,
            "local_bytes": kernel.stack_bytes,
            "spilled_bytes": kernel.spill_bytes,
            "resident_blocks": self.resident.blocks,
            "occupancy": self.resident.share,
            "limited_by": list(self.resident.limits),
            "sass": self.counts,
        }

    def cells(self) -> list[str]:
        """What stands behind the kernel's name. None of something is a dash, so that the rest is seen."""
        kernel, resident = self.kernel, self.resident
        shared = f"{kernel.shared_bytes}" + (f" + {self.dynamic_bytes}" if self.dynamic_bytes else "")
        numbers = [
            kernel.threads,
            kernel.registers,
            shared,
            kernel.stack_bytes,
            kernel.spill_bytes,
            resident.blocks,
            f"{resident.share:.0%}",
            ", ".join(resident.limits),
            *self.counts.values(),
        ]
        return ["-" if number in (0, "0") else str(number) for number in numbers]


COLUMNS = (
    "kernel",
    "threads",
    "registers",
    "shared B",
    "local B",
    "spilled B",
    "blocks",
    "occupancy",
    "limited by",
)


def lines_of(kernels: tuple[Kernel, ...], budgets: Budgets) -> list[Line]:
    """The lines of one architecture. A kernel that does not state its block size may be launched with the largest."""
    lines = []
    for kernel in kernels:
        dynamic = budgets.dynamic_bytes(kernel)
        threads = kernel.threads or LARGEST_BLOCK
        resident = occupancy(kernel.architecture, threads, kernel.registers, kernel.shared_bytes + dynamic)
        counts = {name: kernel.count(name) for name in (*budgets.counted, *ALSO_COUNTED)}
        lines.append(Line(kernel, dynamic, resident, counts))
    return lines


def rows_of(lines: list[Line]) -> list[list[str]]:
    """Title and cells of each kernel, those of several types in one row where all else agrees."""
    types: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        arguments = line.kernel.arguments
        named = [argument for argument in arguments if argument in TYPE_NAMES.values()]
        others = [argument for argument in arguments if argument not in named]
        key = (line.kernel.name, ", ".join(others), *line.cells())
        types.setdefault(key, []).extend(named)
    rows = []
    for (name, others, *cells), named in types.items():
        arguments = ", ".join(filter(None, (" | ".join(named), others)))
        rows.append([f"{name}<{arguments}>" if arguments else name, *cells])
    return rows


def table_of(architecture: str, lines: list[Line]) -> Table:
    table = Table(title=architecture, title_justify="left", box=None, pad_edge=False)
    for column in (*COLUMNS, *lines[0].counts):
        table.add_column(column, justify="left" if column in ("kernel", "limited by") else "right")
    local = COLUMNS.index("local B")
    for row in rows_of(lines):
        table.add_row(*row, style=None if row[local] == "-" else "yellow")
    return table


def markdown_of(architecture: str, lines: list[Line]) -> str:
    columns = (*COLUMNS, *lines[0].counts)
    rows = [
        " | ".join([f"`{title}`".replace("|", "\\|"), *cells])  # in code, or <float32> would be a tag
        for title, *cells in rows_of(lines)
    ]
    head = [f"## {architecture}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*head, *(f"| {row} |" for row in rows), ""])


def legend(budgets: Budgets) -> str:
    return (
        "Registers, local memory and spills are a thread's; shared memory is a block's: static + what "
        f"{budgets.context:,} tokens of context take.\nBlocks and occupancy are a multiprocessor's; below an "
        "instruction's name stands how often it is in the code."
    )


def broken_budgets(lines: list[Line], budgets: Budgets) -> list[str]:
    """Sentences about kernels over their budget or without one; the path for any head dim is held to none."""
    held = [line.kernel for line in lines if budgets.holds(line.kernel)]
    missing = {kernel.name for kernel in held} - budgets.kernels.keys()
    sentences = [f"{name} has no row in tests/kernels/budgets.toml" for name in sorted(missing)]
    for kernel in held:
        if kernel.name not in missing:
            sentences += breaches(kernel, budgets.kernels[kernel.name])
    return sentences


def write_files(folder: Path, by_architecture: dict[str, list[Line]], budgets: Budgets) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    everything = [line.to_json() for lines in by_architecture.values() for line in lines]
    content = {"nvcc": RELEASE, "context": budgets.context, "kernels": everything}
    (folder / "kernels-report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    pages = [markdown_of(architecture, lines) for architecture, lines in by_architecture.items()]
    head = f"# CUDA kernels as nvcc {RELEASE} compiles them\n\n{legend(budgets)}\n\n"
    (folder / "kernels-report.md").write_text(head + "\n".join(pages), encoding="utf-8")


def main(folder: Path) -> int:
    toolkit = find_toolkit()
    if toolkit is None:
        print(f"error: no nvcc {RELEASE}: run tools/setup.sh nvcc", file=sys.stderr)
        return 1
    budgets = load_budgets()
    by_architecture = {}
    with tempfile.TemporaryDirectory() as objects:
        for architecture in MULTIPROCESSORS:
            try:
                kernels = compile_kernels(toolkit, architecture, Path(objects)).kernels
            except CompileError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            by_architecture[architecture] = lines_of(kernels, budgets)
    write_files(folder, by_architecture, budgets)
    console = Console(width=WIDTH)
    for architecture, lines in by_architecture.items():
        console.print(table_of(architecture, lines), "")
    print(legend(budgets))
    sentences = [s for lines in by_architecture.values() for s in broken_budgets(lines, budgets)]
    for sentence in sentences:
        console.print(f"over budget: {sentence}", style="red", highlight=False)
    print(
        f"{sum(map(len, by_architecture.values()))} kernels, {len(sentences)} breaches; in {folder}/kernels-report.*"
    )
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build")))
