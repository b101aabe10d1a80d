"""The gdb session on the page about kernels was typed once: its lines must still be those of the kernel."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_lines_that_gdb_shows_are_those_of_the_kernel() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    session = page[page.index("$ gdb -q") :]
    file, line = re.findall(r"\(gdb\) break (\w+\.cuh):(\d+) if", session)[0]
    source = (ROOT / "csrc" / "kernels" / file).read_text(encoding="utf-8").splitlines()
    shown = dict(re.findall(r"^(\d+)\t(.+)$", session, re.MULTILINE))
    assert line in shown
    assert len(shown) == 2
    for number, text in shown.items():
        assert source[int(number) - 1] == text, f"{file}:{number}"
