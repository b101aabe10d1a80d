"""What every benchmark does with its figures: a table or JSON on the screen, a file, a picture."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fast.bench.plots import Draw, load_matplotlib, save_picture
from fast.cores import available_cores

Document = dict[str, Any]

UNLIMITED = 10_000  # columns: to ask how wide a table would like to be


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--save`."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object and no table")
    group.add_argument(
        "--save", type=Path, metavar="PATH", help="write PATH.json and the picture PATH.png as well"
    )


def check_output_options(arguments: argparse.Namespace) -> None:
    """Before anything is measured. Raises ValueError: what `--save` asks for cannot be made."""
    if arguments.save is not None:
        load_matplotlib()


def make_document(benchmark: str, **figures: Any) -> Document:
    """The figures of a benchmark, with the day and the machine."""
    day = datetime.now(timezone.utc).date().isoformat()
    return {"benchmark": benchmark, "date": day, "machine": describe_machine(), **figures}


def describe_machine() -> dict[str, Any]:
    """The processor, the cores that this process may use, and how busy they were over the last minute."""
    return {
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in pairs}
    name = fields.get("model name", platform.machine())
    numbers = [fields.get(key) for key in ("cpu family", "model")]
    # Cloud machines hide the model's name ("AMD EPYC"); family and model still tell the generation.
    return name if None in numbers else f"{name}, family {numbers[0]} model {numbers[1]}"


def report(arguments: argparse.Namespace, document: Document, table: Callable[[], None], draw: Draw) -> None:
    """Print the table, or the document as JSON, and write what `--save` asks for."""
    if arguments.json:
        print(json.dumps(document))
    else:
        table()
    if arguments.save is not None:
        save(document, arguments.save, draw)


def save(document: Document, path: Path, draw: Draw) -> None:
    """Write PATH.json and PATH.png; an ending that PATH has already is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    save_picture(path.with_suffix(".png"), draw)


def print_table(
    title: str, headings: list[str], rows: list[list[str]], notes: list[str] | None = None
) -> None:
    """The first column is text, the others are numbers. Lines break between words, and no number is cut.

    A file gets one line a row, however wide.
    """
    table = Table(title=title)
    for index, cells in enumerate(zip(headings, *rows, strict=True)):
        longest_word = max((len(word) for cell in cells for word in cell.split()), default=1)
        table.add_column(cells[0], justify="right" if index else "left", min_width=longest_word)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    natural = console.measure(table, options=console.options.update(width=UNLIMITED)).maximum
    if not console.is_terminal:
        console.width = max(console.width, natural)
    elif console.width < natural:  # what frames take is needed
        table.box, table.pad_edge, table.padding = None, False, (0, 1, 0, 0)
    console.print(table, crop=False)
    for note in notes or []:
        console.print(note)
