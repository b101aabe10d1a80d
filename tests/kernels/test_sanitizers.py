"""The packed product under the address and undefined-behaviour sanitizers, on random shapes and types."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fast import kernels
from tests.kernels.test_build import ISAS

SOURCES = [
    "csrc/tests/linear_shapes.cpp",
    *(f"csrc/cpu/{name}.cpp" for name in ("isa", "linear", "packed_matrix", "thread_pool", "weight_memory")),
]
# As CMakeLists.txt has them, but with checks and less optimisation.
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-Wno-psabi",
]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture
def program(repository: Path, tmp_path: Path) -> Path:
    path = tmp_path / "linear_shapes"
    command = [
        os.environ.get("CXX", "g++"),
        *FLAGS,
        *SANITIZERS,
        "-pthread",
        "-Icsrc",
        *SOURCES,
        "-o",
        str(path),
    ]
    built = subprocess.run(command, check=False, cwd=repository, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return path


def test_random_shapes_stay_inside_their_buffers_and_equal_a_sum_in_float64(program: Path) -> None:
    for isa in ISAS[: ISAS.index(kernels.isa()) + 1]:
        result = subprocess.run(
            [program, "500"],
            check=False,
            env={**os.environ, "TWINFER_ISA": isa},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stdout + result.stderr[:3000]
        assert result.stdout.strip() == f"500 cases, {isa}"
