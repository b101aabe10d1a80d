"""How close a decision was: two programs that add in different orders may disagree only where it was close.

The margin of a sampled token is the smallest change of a score that could have changed the choice: the gap between the
two best scores that were compared, or the distance of the nearest candidate to the min_p, top-k or top-p border. Masks
are exact and have no border; bias and penalties come before, and what is compared are the processed logits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reference.contracts.sampling_params import GREEDY_TEMPERATURE

MAX_EXCUSED_MARGIN = 1e-4  # in units of the scores compared: logits, or logits / T + noise
MAX_EXCUSED_LOGIT_GAP = 1e-3  # between the two tiers' logits of one row


class Decision(NamedTuple):
    """What decided one token."""

    margin: float
    logit_gap: float  # largest difference between the two tiers' logits

    @property
    def is_excused(self) -> bool:
        return self.margin < MAX_EXCUSED_MARGIN and self.logit_gap < MAX_EXCUSED_LOGIT_GAP


def decision_margin(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, noise: np.ndarray, min_p: float = 0.0
) -> float:
    """How far a choice was from turning out otherwise.

    Args:
        logits: float32 [V], processed; minus infinity where masked.
        temperature, top_k, top_p, min_p: as in `SamplingParams`.
        noise: float64 [V], what was added to logits / temperature; not read when the choice is greedy.

    Returns:
        The margin in units of the scores compared: logits when greedy, else logits / temperature + noise. Infinite
        when there was nothing to choose.
    """
    candidates = np.flatnonzero(logits > -np.inf)
    scores = logits[candidates].astype(np.float64)  # [C]
    if temperature < GREEDY_TEMPERATURE or len(scores) < 2:
        return _gap_of_best_two(scores)
    scores, noise = scores / temperature, noise[candidates]
    best_first = np.argsort(-scores, kind="stable")  # [C]
    border = np.inf
    if min_p > 0:
        distances = scores[best_first] - (scores.max() + np.log(min_p))  # descending; the best is always kept
        border = float(np.abs(distances[1:]).min())
        best_first = best_first[distances >= 0]
    if 0 < top_k < len(best_first):
        border = min(border, float(scores[best_first[top_k - 1]] - scores[best_first[top_k]]))
        best_first = best_first[:top_k]
    if top_p < 1:
        num_kept, distance = _nucleus(scores[best_first], top_p)
        border = min(border, distance)
        best_first = best_first[:num_kept]
    return min(border, _gap_of_best_two((scores + noise)[best_first]))


def _gap_of_best_two(scores: np.ndarray) -> float:
    if len(scores) < 2:
        return float("inf")
    second, best = np.partition(scores, -2)[-2:]
    return float(best - second)


def _nucleus(descending: np.ndarray, top_p: float) -> tuple[int, float]:
    """(tokens kept by top-p, distance to keeping one more or one less, in units of the scores).

    Raising the kept scores by a small d against the others moves their summed probability c by d * c * (1 - c), so a
    distance in probability is divided by c * (1 - c). Swapping the last kept token with its neighbour takes the gap
    between the two.
    """
    weights = np.exp(descending - descending[0])
    cumulative = np.cumsum(weights / weights.sum())
    num_kept = min(int(np.searchsorted(cumulative, top_p, side="left")) + 1, len(descending))
    distances = [
        abs(float(cumulative[i]) - top_p) / max(float(cumulative[i] * (1 - cumulative[i])), 1e-12)
        for i in (num_kept - 2, num_kept - 1)
        if 0 <= i < len(cumulative) - 1
    ]
    if num_kept < len(descending):
        distances.append(float(descending[num_kept - 1] - descending[num_kept]))
    return num_kept, min(distances, default=float("inf"))
