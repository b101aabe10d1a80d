"""What each primitive of the emulator computes, with both ways to switch between fibers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.simt import native

NAMES = re.findall(r'^    \{"(\w+)",', (native.SOURCES / "primitives.cu").read_text(), re.MULTILINE)


@pytest.fixture(scope="session")
def programs(build_folder: Path) -> dict[str, Path]:
    return {how: native.build("primitives", how, build_folder) for how in ("plain", "ucontext")}


@pytest.mark.parametrize("how", ["plain", "ucontext"])
@pytest.mark.parametrize("name", NAMES)
def test_a_primitive_computes_what_cuda_says(programs: dict[str, Path], how: str, name: str) -> None:
    assert native.run(programs[how], name) == native.Result(0, "ok\n")


def test_every_case_of_the_program_is_run(programs: dict[str, Path]) -> None:
    assert native.run(programs["plain"], "--list").text.split() == NAMES
    assert len(NAMES) == len(set(NAMES)) > 25
