"""Every rung of every operation under the sanitizers: no race, no access out of bounds, nothing misaligned."""

from __future__ import annotations

from pathlib import Path

import pytest

from fast import kernels
from tests.simt import native

RUNGS = [
    pytest.param(operation, str(number), id=f"{operation}-{name}")
    for operation, names in kernels.ladder("simt").rungs.items()
    for number, name in enumerate(names, 1)
]


@pytest.fixture(scope="session")
def tsan(build_folder: Path) -> Path:
    return native.build("real_kernels", "tsan", build_folder)


@pytest.fixture(scope="session")
def asan(build_folder: Path) -> Path:
    return native.build("real_kernels", "asan", build_folder)


@pytest.mark.parametrize(("operation", "rung"), RUNGS)
def test_no_rung_races_and_all_agree_with_the_first(tsan: Path, operation: str, rung: str) -> None:
    assert native.run(tsan, operation, rung, "3") == native.Result(0, "ok\n")


@pytest.mark.parametrize("seed", ["0", "4"])
@pytest.mark.parametrize(("operation", "rung"), RUNGS)
def test_no_rung_leaves_its_memory(asan: Path, operation: str, rung: str, seed: str) -> None:
    assert native.run(asan, operation, rung, seed) == native.Result(0, "ok\n")
