"""Times taken while the site is built. They are of the machine that builds it, so pages say so and compare ratios."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch

from fast import kernels

V, C = 49152, 576  # the head of the embedded model, its largest matrix: [V, C]


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels keep to one core: a neighbour then costs a call now and then, and not every barrier of a team."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_of(call: Callable[[], object], seconds: float = 0.15, least: int = 3) -> float:
    """The shortest of the calls that fit into so much time: what the machine can do when nobody disturbs it."""
    best, count, end = float("inf"), 0, time.perf_counter() + seconds
    while count < least or time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best, count = min(best, time.perf_counter() - started), count + 1
    return best


@cache
def packed_head(weight_type: str) -> kernels.PackedMatrix:
    """A random [V, C] matrix in one of the types of GGUF."""
    weight = np.random.default_rng(0).standard_normal((V, C), dtype=np.float32)
    rows = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[weight_type])
    return kernels.pack([(weight_type, torch.from_numpy(np.ascontiguousarray(rows).view(np.uint8)))], C)


@cache
def head_seconds(weight_type: str, rows: int) -> float:
    """`rows` tokens times the head, on one core."""
    packed, x, out = packed_head(weight_type), torch.randn(rows, C), torch.empty(rows, V)
    with one_thread():
        return best_of(lambda: kernels.linear(out, x, packed))


@cache
def read_seconds(num_bytes: int = 256 * 2**20) -> float:
    """Reading so many bytes, more than caches hold, by a sum on one core."""
    numbers = torch.ones(num_bytes // 4)
    with one_thread():
        return best_of(lambda: numbers.sum(), seconds=0.4)


def machine() -> str:
    """In words, for a caption."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"one core of {model} with {kernels.isa()}"
