"""Matrices of a GGUF file in their stored types, beside the float32 ones of its converted form.

A safetensors file of bytes: one uint8 tensor [out, bytes of a row] for each matrix, under its Hugging Face name, its
type and width in the metadata. It is mapped like the others, so that opening it reads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from reference.contracts.protocols import PACKED_TYPES, PackedTensor

PACKED_FILE = "packed.safetensors"
_KEY = "packed_types"


def packed_arrays(tensors: Mapping[str, PackedTensor]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays, metadata) to write as a safetensors file."""
    types = {name: [tensor.type, tensor.in_features] for name, tensor in tensors.items()}
    return {name: tensor.rows for name, tensor in tensors.items()}, {_KEY: json.dumps(types)}


def parse_packed(header: Mapping[str, Any], data: memoryview) -> dict[str, PackedTensor]:
    """What `packed_arrays` described, as views of the mapped file.

    Raises:
        ValueError, LookupError, TypeError: the file is damaged.
    """
    tensors = {}
    for name, (kind, in_features) in json.loads(header["__metadata__"][_KEY]).items():
        begin, end = header[name]["data_offsets"]
        depth, size = PACKED_TYPES[kind]
        rows = np.frombuffer(data[begin:end], dtype=np.uint8).reshape(-1, in_features // depth * size)
        if list(rows.shape) != header[name]["shape"] or in_features % depth:
            raise ValueError(f"the matrix {name!r:.100} is misshapen")
        tensors[name] = PackedTensor(kind, rows, in_features)
    return tensors
