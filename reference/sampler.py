"""From logits to tokens, one row at a time, in the order the numeric contract fixes.

    temperature -> top-k -> top-p -> draw

Everything is float64, and every tie goes to the lowest token id, so two implementations can only disagree where two
scores differ by rounding alone. Fast twin: `fast/sampler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.contracts.noise import gumbel_noise
from reference.contracts.sampling_params import GREEDY_TEMPERATURE


@dataclass(frozen=True)
class SamplingMetadata:
    """Parameters of the R rows to sample, one entry a row. `output_positions` counts a request's outputs from 0."""

    temperature: np.ndarray  # float64 [R]
    top_k: np.ndarray  # int32 [R], 0 or -1 = off
    top_p: np.ndarray  # float64 [R], in (0, 1]
    seeds: np.ndarray  # uint64 [R]
    output_positions: np.ndarray  # int64 [R]


class Sampler:
    """Chooses one token a row. It has no state: a draw depends on the row and its parameters alone."""

    def __call__(self, logits: np.ndarray, metadata: SamplingMetadata) -> list[int]:
        """Logits [R, V] -> R token ids; -1 for a row that contains NaN."""
        return [
            _sample_row(
                logits[r],
                float(metadata.temperature[r]),
                int(metadata.top_k[r]),
                float(metadata.top_p[r]),
                int(metadata.seeds[r]),
                int(metadata.output_positions[r]),
            )
            for r in range(len(logits))
        ]


def _sample_row(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, seed: int, output_position: int
) -> int:
    if np.isnan(logits).any():
        return -1
    if temperature < GREEDY_TEMPERATURE:
        return int(np.argmax(logits))  # argmax returns the first of equals: the lowest id

    z = logits.astype(np.float64) / temperature  # [V]
    kept = _kept_token_ids(z, top_k, top_p)  # [K], ascending
    noise = gumbel_noise(seed, output_position, len(z))  # [V]
    return int(kept[np.argmax(z[kept] + noise[kept])])


def _kept_token_ids(z: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Ids that survive top-k and then top-p, in ascending order so that the argmax over them keeps the lowest id."""
    vocab_size = len(z)
    if top_k < 1 and top_p >= 1:
        return np.arange(vocab_size)
    best_first = np.argsort(-z, kind="stable")  # [V]; stable: of equals the lowest id comes first
    if top_k >= 1:
        best_first = best_first[:top_k]  # [min(top_k, V)]
    if top_p < 1:
        best_first = best_first[: _nucleus_size(z[best_first], top_p)]
    return np.sort(best_first)


def _nucleus_size(z: np.ndarray, top_p: float) -> int:
    """Length of the shortest prefix of the descending z whose probability reaches top_p; at least 1.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2019).
    """
    weights = np.exp(z - z[0])
    cumulative = np.cumsum(weights / weights.sum())
    return int(np.searchsorted(cumulative, top_p, side="left")) + 1
