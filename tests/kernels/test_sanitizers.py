"""Kernels on random shapes under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fast import kernels
from tests.kernels.test_build import ISAS

SOURCES = {
    "linear_shapes": ("isa", "linear", "packed_matrix", "thread_pool", "weight_memory"),
    "attention_shapes": ("isa", "paged_attention", "thread_pool"),
}
# As CMakeLists.txt has them, but with checks and less optimisation; attention with none, which compiles in a third.
FLAGS = [
    "-std=c++17",
    "-g",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-Wno-psabi",
]
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD = ("-fsanitize=thread",)
OPTIMISATION = {"linear_shapes": "-O1", "attention_shapes": "-O0"}
CASES = {"linear_shapes": 500, "attention_shapes": 60}


def build(name: str, repository: Path, folder: Path, sanitizers: tuple[str, ...]) -> Path:
    path = folder / name
    sources = [f"csrc/tests/{name}.cpp", *(f"csrc/cpu/{source}.cpp" for source in SOURCES[name])]
    compiler = os.environ.get("CXX", "g++")
    command = [
        compiler,
        OPTIMISATION[name],
        *FLAGS,
        *sanitizers,
        "-pthread",
        "-Icsrc",
        *sources,
        "-o",
        str(path),
    ]
    built = subprocess.run(command, check=False, cwd=repository, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return path


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_random_shapes_stay_inside_their_buffers_and_equal_a_sum_in_float64(
    name: str, repository: Path, tmp_path: Path
) -> None:
    program = build(name, repository, tmp_path, ADDRESS)
    for isa in ISAS[: ISAS.index(kernels.isa()) + 1]:
        result = subprocess.run(
            [program, str(CASES[name])],
            check=False,
            env={**os.environ, "TWINFER_ISA": isa},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stdout + result.stderr[:3000]
        assert result.stdout.strip() == f"{CASES[name]} cases, {isa}"


def test_threads_that_share_a_context_do_not_race(repository: Path, tmp_path: Path) -> None:
    program = build("attention_shapes", repository, tmp_path, THREAD)
    # Older versions of the sanitizer do not start where addresses are as random as newer kernels make them.
    for prefix in ([], [shutil.which("setarch") or "setarch", "-R"]):
        command = [*prefix, program, "40"]
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        if "unexpected memory mapping" not in result.stderr:
            break
    assert result.returncode == 0, result.stdout + result.stderr[:3000]
    assert "WARNING: ThreadSanitizer" not in result.stderr, result.stderr[:3000]
