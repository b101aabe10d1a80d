"""The checklist for a machine with a GPU, as far as it goes without one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fast import kernels
from tests.gpu import rung_times
from tests.gpu.rung_times import Sizes

ROOT = Path(__file__).resolve().parents[2]
STEPS = ["machine", "packages", "build", "kernels", "engine", "embedded", "memcheck", "racecheck", "times"]
SMALL = Sizes(seqs=2, context=32, chunk=5, heads=4, kv_heads=2, head_dim=64, block_size=16, rows=3, width=64)


def run_check(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "tests/gpu/check.sh", *options]
    env = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True)


def test_a_dry_run_prints_every_step_with_its_limit_and_does_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_check("--dry-run", "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines() if " at most " in line] == STEPS
    assert not out.exists()


def test_the_commands_are_lines_that_bash_can_read() -> None:
    printed = run_check("--dry-run").stdout
    for name in STEPS:
        begin = printed.index(f"{name} ".ljust(12)) + len(f"{name:11} at most 000 s   ")
        following = [printed.find(f"\n{other} ".ljust(12), begin) for other in STEPS]
        command = printed[begin : min(i for i in (*following, len(printed)) if i > 0)]
        read = subprocess.run(["bash", "-n", "-c", command], check=False, capture_output=True, text=True)
        assert read.returncode == 0, (command, read.stderr)
        for word in command.replace("'", " ").split():
            if word.startswith("tests/") and not word.endswith("_*.py"):
                assert list(ROOT.glob(word)), word


def test_only_the_steps_that_are_named_run() -> None:
    printed = run_check("--dry-run", "--only", "build,times").stdout
    assert [line.split()[0] for line in printed.splitlines() if " at most " in line] == ["build", "times"]


def test_the_sanitizer_beside_nvcc_will_do(tmp_path: Path) -> None:
    for name in ("nvcc", "compute-sanitizer"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    printed = run_check(
        "--dry-run", "--only", "memcheck", CUDACXX=str(tmp_path / "nvcc"), PATH="/usr/bin:/bin"
    )
    assert f" {tmp_path}/compute-sanitizer --target-processes all" in printed.stdout


def test_paths_are_relative_to_where_it_is_called(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "tests/gpu/check.sh"), "--dry-run", "--out", "here"]
    printed = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    assert f"venv --system-site-packages {tmp_path}/here/venv" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    result = run_check()
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "sees no GPU: run this on a machine that has one" in result.stderr


def test_an_unknown_option_prints_how_to_call_it() -> None:
    result = run_check("--fast")
    assert result.returncode == 2
    assert result.stderr.startswith("tests/gpu/check.sh [--dry-run]")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rung_is_timed_against_a_copy_and_torch_and_gives_what_torch_gives(dtype: torch.dtype) -> None:
    ladder = kernels.ladder("simt")
    lines = rung_times.measure(ladder, SMALL, dtype, "cpu", repeats=1)
    assert (lines[0].title, lines[0].rung) == ("device copy", "torch")
    timed = {(line.title.split()[0].rstrip(","), line.rung) for line in lines[1:]}
    for operation in ("rms_norm", "softmax", "silu_mul", "paged_attention", "prefill_attention"):
        takes = [r for r in ladder.rungs[operation] if dtype != torch.float32 or "tensor_cores" not in r]
        assert {rung for name, rung in timed if name == operation} == {"torch", *takes}
    page = rung_times.markdown(dtype, lines)
    assert page.count("\n| ") == len(lines) + 1
    assert "| device copy | torch |" in page
    assert page.splitlines()[4].endswith(" 100% |")


def test_a_wrong_result_has_no_time() -> None:
    (work, *_) = rung_times.elementwise(SMALL, torch.float32, "cpu")
    wrong = replace(work, launch=lambda ladder, rung: None)  # the result stays what it was filled with
    with pytest.raises(ValueError, match=r"rms_norm \[3, 64\], v1_naive: differs from torch by"):
        rung_times.times_of(wrong, kernels.ladder("simt"), "cpu", 1)


def test_bytes_are_those_that_must_cross_memory_once() -> None:
    norm, _, silu = rung_times.elementwise(SMALL, torch.bfloat16, "cpu")
    assert (norm.bytes, silu.bytes) == (3 * 64 * 2 * 2, 3 * 64 * 2 * 3 // 2)
    decode, _ = rung_times.attention(SMALL, torch.float32, "cpu")
    query, keys, tables = 2 * 4 * 64 * 4, 2 * 32 * 2 * 64 * 4, 2 * 2 * 4
    assert decode.bytes == 2 * query + 2 * keys + tables
