"""Sort once, sum up, and look where the sum reaches p."""

import numpy as np


def nucleus(probabilities: np.ndarray, p: float) -> list[int]:
    order = np.argsort(-probabilities, kind="stable")
    size = int(np.searchsorted(np.cumsum(probabilities[order]), p, side="left")) + 1
    return [int(token_id) for token_id in order[:size]]
