"""Unpack four-bit weights.

In the format Q4_1 a block of 32 weights is 20 bytes: a scale and a minimum as float16, then 16 bytes whose low halves
are weights 0 to 15 and whose high halves are weights 16 to 31. A weight is scale * q + minimum, in float32. Unpack a
whole row of blocks.
"""

import numpy as np

HINTS = (
    "data.reshape(-1, 20): columns 0 and 1 are the scale, 2 and 3 the minimum; .copy().view(np.float16).",
    "byte & 15 and byte >> 4.",
)


def unpack(data: np.ndarray) -> np.ndarray:
    """uint8 [20 * blocks] -> float32 [32 * blocks]."""
    raise NotImplementedError
