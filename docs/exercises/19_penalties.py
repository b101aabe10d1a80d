"""Three penalties.

Repetition looks at prompt and output: a positive logit of a token that occurred is divided by the penalty, a negative
one multiplied by it. Frequency takes its penalty off for each occurrence in the output, presence once for a token that
is in the output at all. They are applied in this order. Return new logits; leave the given ones as they are.
"""

import numpy as np

HINTS = (
    "Why is a negative logit multiplied? Divided by 1.5, -3 would become -2: likelier than before.",
    "np.bincount(output, minlength=len(logits)) counts all tokens at once.",
)


def penalize(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
) -> np.ndarray:
    raise NotImplementedError
