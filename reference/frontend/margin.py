"""How close a decision was: two programs that add in different orders may disagree only where it was close.

The margin of a sampled token is the smallest change of a score that could have changed the choice: the gap between the
two best scores that were compared, or the distance of the nearest candidate to the top-k or top-p border.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reference.contracts.noise import gumbel_noise
from reference.contracts.sampling_params import SamplingParams

MAX_EXCUSED_MARGIN = 1e-4  # in units of the scores compared: logits, or logits / T + noise
MAX_EXCUSED_LOGIT_GAP = 1e-3  # between the two tiers' logits of one row


class Decision(NamedTuple):
    """What decided one token."""

    margin: float
    logit_gap: float  # largest difference between the two tiers' logits

    @property
    def is_excused(self) -> bool:
        return self.margin < MAX_EXCUSED_MARGIN and self.logit_gap < MAX_EXCUSED_LOGIT_GAP


def decision_margin(logits: np.ndarray, params: SamplingParams, seed: int, output_position: int) -> float:
    """Margin of the token drawn from `logits` (float32 [V])."""
    scores = logits.astype(np.float64)  # [V]
    if params.is_greedy:
        return _gap_of_best_two(scores)
    scores = scores / params.temperature
    order = np.argsort(-scores, kind="stable")  # [V], best first
    border = np.inf
    if 0 < params.top_k < len(scores):
        border = float(scores[order[params.top_k - 1]] - scores[order[params.top_k]])
        order = order[: params.top_k]
    if params.top_p < 1:
        num_kept, distance = _nucleus(scores[order], params.top_p)
        border = min(border, distance)
        order = order[:num_kept]
    noise = gumbel_noise(seed, output_position, len(scores))  # [V]
    return min(border, _gap_of_best_two((scores + noise)[order]))


def _gap_of_best_two(scores: np.ndarray) -> float:
    if len(scores) < 2:
        return float("inf")
    second, best = np.partition(scores, -2)[-2:]
    return float(best - second)


def _nucleus(descending: np.ndarray, top_p: float) -> tuple[int, float]:
    """(tokens kept by top-p, distance to keeping one more or one less, in units of the scores).

    A shift of all scores by d moves a cumulative probability c by about d * c * (1 - c) at most, so a distance in
    probability is turned into one in scores by that factor; swapping the token at the border with its neighbour takes
    the gap between the two.
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
