"""The same sources under nvcc: they compile without a warning, and the tuned kernels keep out of local memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
# The accumulator of a whole head in one thread is what the naive rung is there to show.
LOCAL_MEMORY_EXPECTED = "attention_v1_naive"

pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed, and CUDACXX names no other")


def stack_frames(report: str) -> dict[str, int]:
    """Kernel -> bytes of local memory a thread, from what `ptxas -v` printed."""
    entries = re.findall(r"Function properties for (\S+)\s+(\d+) bytes stack frame", report)
    return {name: int(size) for name, size in entries}


@pytest.mark.parametrize("source", ["attention", "cache", "layers", "prefill", "sampling"])
def test_every_kernel_compiles_for_sm_80_without_warnings_and_only_the_naive_one_uses_local_memory(
    source: str, repository: Path, tmp_path: Path
) -> None:
    command = [str(NVCC), "-std=c++17", "-arch=sm_80", "-Werror", "all-warnings", "-Xptxas", "-v"]
    command += ["-I", "csrc", "-c", f"csrc/cuda/{source}.cu", "-o", str(tmp_path / "object.o")]
    result = subprocess.run(command, check=False, cwd=repository, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    frames = stack_frames(result.stderr)
    assert len(frames) >= 9  # at least three kernels in three types
    spilled = {name: size for name, size in frames.items() if size and LOCAL_MEMORY_EXPECTED not in name}
    assert not spilled
