"""Softmax in one pass.

FlashAttention never holds a whole row of scores. It goes over them in tiles and keeps three things: the largest score
so far, the sum of exp(score - largest), and the weighted sum of values so far. When a tile brings a larger score, what
was summed up so far is scaled down. Write it for one query.
"""

import numpy as np

HINTS = (
    "Begin with largest = -inf, total = 0, output = zeros.",
    "With a new maximum m: scale = exp(old - m). Both total and output are multiplied by it.",
    "exp(-inf - m) is 0, so the first tile needs no case of its own.",
)


def attend(scores: np.ndarray, values: np.ndarray, tile: int) -> np.ndarray:
    """scores [L], values [L, D] -> softmax(scores) @ values, [D], reading `tile` scores at a time."""
    raise NotImplementedError
