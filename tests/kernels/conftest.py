"""Helpers of the kernel tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's thread count, which the kernels take over, and restores it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[2]
