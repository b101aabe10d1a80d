"""Occupancy as computed here, against cases worked out by hand and against NVIDIA's own calculator."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from tests.kernels.nvcc import in_one_worker, on_linux, the_toolkit
from tools.occupancy import MULTIPROCESSORS, occupancy


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks", "limits"),
    [
        (128, 80, 0, 6, ("registers",)),  # 2,560 registers a warp: 6 in each quarter
        (128, 32, 0, 16, ("warps", "registers")),
        (32, 16, 0, 32, ("blocks",)),
        (256, 32, 40 * 1024, 4, ("shared memory",)),  # 41 KiB with the reserved one, of 164
        (128, 16, 163 * 1024, 1, ("shared memory",)),
        (128, 16, 163 * 1024 + 1, 0, ("shared memory",)),
    ],
)
def test_the_scarcest_thing_limits_the_blocks(
    threads: int, registers: int, shared: int, blocks: int, limits: tuple[str, ...]
) -> None:
    found = occupancy("sm_80", threads, registers, shared)
    assert (found.blocks, found.limits) == (blocks, limits)
    assert found.share == blocks * -(-threads // 32) / 64


@on_linux
@in_one_worker
def test_blocks_are_those_of_the_calculator_that_comes_with_cuda(repository: Path, tmp_path: Path) -> None:
    toolkit = the_toolkit()
    program = tmp_path / "calculator"
    source = repository / "tests" / "kernels" / "cuda_occupancy.cpp"
    command = [toolkit.nvcc, "-cudart", "none", source, "-o", program]
    built = subprocess.run(command, check=False, env=toolkit.environment(), capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    threads = [1, 32, 64, 96, 128, 160, 256, 384, 512, 768, 1024]
    registers = [8, 16, 24, 31, 32, 40, 63, 64, 72, 80, 96, 128, 168, 255]
    shared = [
        0,
        1,
        127,
        1024,
        8208,
        12304,
        20496,
        33 * 1024,
        48 * 1024,
        99 * 1024,
        163 * 1024,
        200 * 1024,
        227 * 1024,
    ]
    cases = list(itertools.product(MULTIPROCESSORS, threads, registers, shared))
    lines = "".join(f"{a.removeprefix('sm_')} {t} {r} {s}\n" for a, t, r, s in cases)
    result = subprocess.run([program], check=True, input=lines, capture_output=True, text=True)
    expected = [int(line) for line in result.stdout.split()]
    got = [occupancy(*case).blocks for case in cases]
    assert len(expected) == len(cases) > 3000
    assert [(c, g, e) for c, g, e in zip(cases, got, expected, strict=True) if g != e] == []
