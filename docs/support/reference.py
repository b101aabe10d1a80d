"""Reference pages made from the program itself: help texts, and the cards at the heads of the kernels."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from unittest import mock

from fast.bench.options import BENCHMARKS
from reference.frontend.cli import _COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


def command_names() -> list[str]:
    return [command.name for command in _COMMANDS]


def benchmark_names() -> list[str]:
    return [benchmark.name for benchmark in BENCHMARKS]


def command_help(*words: str) -> str:
    """What `twinfer WORDS --help` prints, 100 columns wide and without colours."""
    printed = io.StringIO()
    plain = {"COLUMNS": "100", "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, plain), contextlib.redirect_stdout(printed):
        try:
            main([*words, "--help"])
        except SystemExit as end:
            assert end.code == 0, words
    return printed.getvalue().rstrip()


def kernel_cards() -> dict[str, str]:
    """Path of each file with rungs -> the comment at its head, without the slashes."""
    cards = {}
    for path in sorted((ROOT / "csrc" / "kernels").glob("*.cuh")):
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("//"):
                break
            lines.append(line.removeprefix("//").removeprefix(" "))
        if any(line.startswith(("rung ", "v1_")) for line in lines):
            cards[path.relative_to(ROOT).as_posix()] = "\n".join(lines)
    return cards
