"""Helpers of the tests of the CUDA kernels: every rung, in every type, under several orders of threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch

from fast import kernels
from fast.ladder import Ladder
from tests.devices import DEVICE, Elsewhere

# Absolute, times max(1, largest |expected|), for inputs of N(0, 1). The 16-bit types round what they store at 5e-4 and
# 4e-3 of a number: half a step of the result, and half a step of what is stored in between.
ELEMENTWISE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ATTENTION = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Ascending order on one OS thread, and two drawn orders with blocks spread over two. A GPU has its own.
ORDERS = [(0, 1), (1, 2), (2, 2)] if DEVICE == "simt" else [(0, 1)]


@dataclass(frozen=True)
class Rung:
    """One rung of one operation, on an emulator set up in one way. `name` goes to the call."""

    operation: str
    name: str
    ladder: Ladder

    def takes(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Tensor cores multiply 16-bit numbers only, and their rungs are compiled for two head dims."""
        return "tensor_cores" not in self.name or (dtype in DTYPES[1:] and head_dim in (64, 128))


def ladder(seed: int, threads: int) -> Ladder:
    """Of the device that the tests are for, for tensors of the CPU."""
    if DEVICE == "simt":
        return kernels.ladder(DEVICE, seed=seed, threads=threads)
    return cast(Ladder, Elsewhere(kernels.ladder(DEVICE), DEVICE))


def rungs_of(operation: str) -> tuple[str, ...]:
    return kernels.ladder("simt").rungs[operation]


def every_rung(*operations: str) -> pytest.MarkDecorator:
    """Parametrizes `rung` over the operations' rungs, each under every order of threads."""
    cases = [
        pytest.param(
            Rung(operation, name, ladder(seed, threads)),
            id=f"{operation}-{name}-order{seed}" if len(operations) > 1 else f"{name}-order{seed}",
        )
        for operation in operations
        for name in rungs_of(operation)
        for seed, threads in ORDERS
    ]
    return pytest.mark.parametrize("rung", cases)


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """N(0, 1), rounded to `dtype`: the oracle is given the same rounded numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def padded(x: torch.Tensor, extra: int) -> torch.Tensor:
    """The same numbers as rows that lie `extra` elements further apart, with NaN between them."""
    wide = poisoned(x.shape[0], x[0].numel() + extra, dtype=x.dtype)
    rows = wide[:, : x[0].numel()].view(x.shape) if x.dim() == 2 else None
    if rows is None:
        rows = wide.as_strided(x.shape, (wide.shape[1], *x.stride()[1:]))
    rows.copy_(x)
    return rows
