"""The order is the engine's, and OpenAI's for the last two."""

import numpy as np


def penalize(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
) -> np.ndarray:
    penalized = logits.astype(np.float64)
    seen = list({*prompt, *output})
    penalized[seen] = np.where(
        penalized[seen] > 0, penalized[seen] / repetition, penalized[seen] * repetition
    )
    counts = np.bincount(np.array(output, dtype=np.int64), minlength=len(logits))
    penalized -= frequency * counts + presence * (counts > 0)
    return penalized.astype(np.float32)
