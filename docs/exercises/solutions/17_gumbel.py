"""The Gumbel-max trick: the race between tokens, with the dice thrown beforehand."""

import numpy as np


def draw(logits: np.ndarray, temperature: float, noise: np.ndarray) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    return int(np.argmax(logits / temperature + noise))
