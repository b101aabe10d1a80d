"""Mask what the grammar forbids.

A grammar says for each token whether it may come next, as bits: bit t % 32 of word t // 32. Return the logits with
minus infinity for every forbidden token. `bitmask` is int32: its highest bit makes a word negative.
"""

import numpy as np

HINTS = (
    "View the words as uint32 first.",
    "(words[t // 32] >> (t % 32)) & 1, for all t at once with np.arange.",
)


def apply_mask(logits: np.ndarray, bitmask: np.ndarray) -> np.ndarray:
    raise NotImplementedError
