"""Keep the nucleus.

Top-p keeps the smallest number of most probable tokens whose probabilities sum up to at least p, and always at least
one. Return their ids, the most probable first; of equal probabilities the lower id first.
"""

import numpy as np

HINTS = (
    "Sort stably by descending probability: np.argsort(-p, kind='stable').",
    "The token with which the sum reaches p is kept as well.",
)


def nucleus(probabilities: np.ndarray, p: float) -> list[int]:
    raise NotImplementedError
