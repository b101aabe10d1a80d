"""How the models of this tier take weights from a checkpoint. The reference uses its arrays as they are.

Matrices stay in the type of their file, packed for the kernels: a step reads every weight once, so fewer bytes are
more tokens. Vectors (norms, biases) are used where the checkpoint maps them.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch

from fast import kernels
from fast.kernels import PackedMatrix
from reference.contracts.protocols import Checkpoint


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor. Torch warns of read-only memory (a mapped file); weights are only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def parameter(array: np.ndarray) -> torch.Tensor:
    """A norm, a bias or a table of positions, where the kernels read it."""
    return kernels.parameter(as_tensor(array))


def packed_matrix(checkpoint: Checkpoint, *names: str) -> PackedMatrix:
    """Matrices [out, in] of one input as one, stacked along `out`; each may have its own type.

    Raises:
        ValueError: a matrix is missing or misshapen.
    """
    parts, in_features = [], 0
    for name in names:
        packed = checkpoint.packed_tensor(name)
        if packed is None:  # a type that the kernels do not read: the dequantised numbers
            weight = checkpoint.tensor(name)
            kind, rows, in_features = "F32", weight.view(np.uint8), weight.shape[1]
        else:
            kind, rows, in_features = packed
        parts.append((kind, as_tensor(rows)))
    return kernels.pack(parts, in_features)


def embedding(ids: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
    """Rows of a packed matrix as numbers: int32 [T] and [V, C] -> [T, C]."""
    rows = kernels.empty(len(ids), weight.in_features)  # [T, C]
    kernels.embedding(rows, ids, weight)
    return rows
