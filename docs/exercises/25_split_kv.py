"""Merge parts of a context.

One long sequence does not fill a GPU if one thread block walks its whole context. So the context is split, each part
gives (largest score, sum of exp(score - largest), weighted sum of values), and a second kernel merges them. Write the
merge. A part may be empty: largest -inf, sum 0, zeros.
"""

import numpy as np

HINTS = (
    "It is exercise 23 with parts in place of tiles.",
    "Scale each part by exp(its largest - the largest of all).",
)


def merge(parts: list[tuple[float, float, np.ndarray]]) -> np.ndarray:
    """Parts (largest, total, output [D]) -> attention over all of them, [D]. At least one part is not empty."""
    raise NotImplementedError
