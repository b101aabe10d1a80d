"""The compiled module as a whole: instruction sets, OpenMP, import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fast import kernels

ISAS = ["baseline", "avx2", "avx512"]


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )


def run_python(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", code], cwd, **environment)


@pytest.mark.parametrize("isa", ISAS)
def test_a_forced_instruction_set_is_used_or_refused_in_one_sentence(isa: str, repository: Path) -> None:
    result = run_python("from fast import kernels; print(kernels.isa())", repository, TWINFER_ISA=isa)
    if result.returncode == 0:
        assert result.stdout.strip() == isa
    else:
        assert ISAS.index(isa) > ISAS.index(kernels.isa())
        assert f"ValueError: TWINFER_ISA={isa} asks for instructions that this CPU" in result.stderr


def test_an_unknown_instruction_set_is_refused_in_one_sentence(repository: Path) -> None:
    result = run_python("import fast.kernels", repository, TWINFER_ISA="sse9")
    assert result.returncode != 0
    assert result.stderr.strip().endswith(
        "ValueError: TWINFER_ISA=sse9 is unknown: use baseline, avx2 or avx512, or unset it."
    )


@pytest.mark.parametrize("isa", ISAS[: ISAS.index(kernels.isa())])
def test_narrower_instruction_sets_pass_the_same_value_and_equal_bits_tests(
    isa: str, repository: Path
) -> None:
    """Every copy of the kernels, in a process forced to use it, against the same oracles and tolerances."""
    suites = [f"tests/kernels/test_{name}.py" for name in ("layers", "linear", "paged_attention", "sampler")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *suites,
    ]
    command += ["-k", "equal or same or nan or infinite or extreme or first_of_the_largest"]
    result = run(command, repository, TWINFER_ISA=isa)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_one_openmp_runtime_is_mapped_beside_torch(repository: Path) -> None:
    """Two of them would each start a team of threads and fight over the cores."""
    code = """
import fast.kernels, pathlib, torch
torch.set_num_threads(2)
x = torch.randn(2000, 512)
fast.kernels.rms_norm(x, x, torch.ones(512), 1e-5)
x @ x.T
maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
for path in sorted({line.split()[-1] for line in maps if "gomp" in line.rsplit("/", 1)[-1]}):
    print(path)
"""
    result = run_python(code, repository)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == 1, result.stdout


def test_a_missing_extension_is_one_sentence_that_says_how_to_build_it(repository: Path) -> None:
    code = """
import sys
sys.modules["fast._cpu"] = None
import fast.kernels
"""
    result = run_python(code, repository)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: The kernels of the fast tier cannot be loaded")
    assert "build them with `make`" in last
