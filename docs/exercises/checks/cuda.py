"""Compiles a reader's kernel with the emulator and runs it: each CUDA thread is a fiber, and no GPU is needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import gettempdir

ROOT = Path(__file__).resolve().parents[3]
EMULATOR = [f"csrc/simt/{name}.cpp" for name in ("fiber", "machine", "warp")]
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-strict-aliasing", "-pthread", "-I", "csrc"]

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "kernels/device.cuh"

#line 1 "your_kernel.cu"
{kernel}

int main(int count, char** words) {{
  twinfer::simt::options().seed = std::strtoull(words[1], nullptr, 10);
  std::vector<float> numbers;
  for (int i = 3; i < count; ++i) numbers.push_back(std::strtof(words[i], nullptr));
  const int threads = std::atoi(words[2]);
  const int blocks = static_cast<int>(numbers.size()) / threads;
  std::vector<float> out({outputs}, -1.0f);
  try {{
    twinfer::device::launch({name}, dim3(blocks), dim3(threads), 0, nullptr, out.data(),
                            static_cast<const float*>(numbers.data()));
  }} catch (const std::exception& error) {{
    std::printf("error: %s\\n", error.what());
    return 3;
  }}
  for (float x : out) std::printf("%.9g ", x);
}}
"""


def run(
    kernel: str, name: str, numbers: list[float], threads: int, outputs: str = "blocks", seed: int = 0
) -> list[float]:
    """Launch `__global__ void name(float* out, const float* in)` on blocks of `threads` threads, a thread a number.

    `outputs` is how many numbers it writes, in terms of `blocks` and `threads`; `seed` draws the order of threads.
    Raises AssertionError with what the compiler or the emulator says.
    """
    program = _build(PROGRAM.format(kernel=kernel, name=name, outputs=outputs))
    words = [str(program), str(seed), str(threads), *map(repr, numbers)]
    result = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, (
        result.stdout.strip() or f"the program ended with status {result.returncode}"
    )
    return [float(word) for word in result.stdout.split()]


def _build(source: str) -> Path:
    """The compiled program; what was compiled before is kept."""
    folder = Path(gettempdir()) / f"twinfer-exercises-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / hashlib.sha256(source.encode()).hexdigest()[:16]
    if program.exists():
        return program
    compiler = os.environ.get("CXX", "g++")
    assert shutil.which(compiler), f"This exercise needs a C++ compiler; there is no {compiler}."
    objects = []
    for file in EMULATOR:
        output = folder / f"{Path(file).stem}-{(ROOT / file).stat().st_mtime_ns}.o"
        if not output.exists():
            _call([compiler, *FLAGS, "-c", file, "-o", str(output)])
        objects.append(str(output))
    text = program.with_suffix(".cpp")
    text.write_text(source)
    _call([compiler, *FLAGS, str(text), *objects, "-o", str(program)])
    return program


def _call(command: list[str]) -> None:
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    assert result.returncode == 0, f"the compiler says: {errors[0] if errors else result.stderr[-400:]}"
