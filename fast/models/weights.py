"""How the models of this tier take weights from a checkpoint. The reference uses its arrays as they are."""

from __future__ import annotations

import warnings

import numpy as np
import torch


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor. Torch warns of read-only memory (a mapped file); weights are only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
