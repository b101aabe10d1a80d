"""One test, two tiers: `reference` computes on NumPy arrays, `fast` on torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_tier_array(tier_name: str, array: np.ndarray) -> Any:
    """A copy of the array in the tier's own kind, so that a layer that works in place cannot spoil the test's input.

    uint64 (seeds) becomes int64 with the same bits in `fast`, which is how seeds travel there.
    """
    if tier_name == "reference":
        return np.array(array)
    import torch

    if array.dtype == np.uint64:
        array = array.view(np.int64)
    source = torch.tensor(array)
    # Filled into a new tensor, whose strides are regular: NumPy gives an array without elements strides of zero.
    return torch.empty(source.shape, dtype=source.dtype).copy_(source)


def to_numpy(array: Any) -> np.ndarray:
    """The tier's array as a NumPy array."""
    return np.asarray(array)


def assert_close(actual: Any, oracle: np.ndarray, tolerance: float) -> None:
    """Every element of float32 `actual` is within tolerance * max(1, |oracle|), compared in float64."""
    values = to_numpy(actual)
    assert values.dtype == np.float32
    assert values.shape == oracle.shape
    oracle = oracle.astype(np.float64)
    error = np.abs(values.astype(np.float64) - oracle) / np.maximum(1.0, np.abs(oracle))
    # The negated form also fails on NaN, which is neither below nor above the tolerance.
    assert not np.any(~(error <= tolerance)), (
        f"largest relative error {np.max(error):.3g}, allowed {tolerance:.3g}"
    )
