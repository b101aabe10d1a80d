"""The threads of the kernels: a stress test, the same under ThreadSanitizer, and life beside Python's processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = ("csrc/tests/thread_pool_stress.cpp", "csrc/cpu/thread_pool.cpp")
COMPILER = os.environ.get("CXX", "g++")


def build(repository: Path, folder: Path, *flags: str) -> Path:
    program = folder / "thread_pool_stress"
    command = [COMPILER, "-std=c++17", "-pthread", "-Icsrc", *flags, *SOURCES, "-o", str(program)]
    built = subprocess.run(command, check=False, cwd=repository, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.parametrize("threads", [2, 4])
def test_every_item_of_every_call_runs_once_on_a_thread_number_of_its_own(
    threads: int, repository: Path, tmp_path: Path
) -> None:
    program = build(repository, tmp_path, "-O2")
    result = subprocess.run(
        [program, "3", str(threads)], check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout
    assert int(result.stdout.split()[0]) > 1000, result.stdout  # calls, a thousandth of what one core does


def test_thread_sanitizer_finds_no_race_in_the_pool(repository: Path, tmp_path: Path) -> None:
    program = build(repository, tmp_path, "-O1", "-g", "-fsanitize=thread")
    # Older versions of the sanitizer do not start where addresses are as random as newer kernels make them.
    plain_addresses = [shutil.which("setarch") or "setarch", "-R"]
    for prefix in ([], plain_addresses):
        result = subprocess.run(
            [*prefix, program, "4", "4"], check=False, capture_output=True, text=True, timeout=120
        )
        if "unexpected memory mapping" not in result.stderr:
            break
    assert result.returncode == 0, result.stdout + result.stderr[:3000]
    assert "WARNING: ThreadSanitizer" not in result.stderr, result.stderr[:3000]


def test_a_forked_child_has_threads_of_its_own(repository: Path) -> None:
    """The parent's workers do not live in a child; waiting for them would be for ever."""
    code = """
import os, torch
from fast import kernels
torch.set_num_threads(4)
x = torch.randn(2000, 512)
expected, out = torch.empty_like(x), torch.empty_like(x)
kernels.rms_norm(expected, x, torch.ones(512), 1e-5)
child = os.fork()
kernels.rms_norm(out, x, torch.ones(512), 1e-5)
if child == 0:
    os._exit(0 if torch.equal(out, expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(out, expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=repository, timeout=60)
