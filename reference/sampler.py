"""From logits to tokens, one row at a time, in the order the numeric contract fixes.

    grammar, allowed ids -> bad words, min_tokens -> logit bias -> penalties
    -> temperature -> min_p -> top-k -> top-p -> draw

The steps before temperature are `contracts.logits.process_logits`. Everything after is float64, and every tie goes to
the lowest token id, so two implementations can only disagree where two scores differ by rounding alone. Fast twin:
`fast/sampler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from reference.contracts.logits import process_logits
from reference.contracts.noise import gumbel_noise
from reference.contracts.sampling_params import GREEDY_TEMPERATURE, SamplingParams

NAN_IN_ROW = -1  # in place of a token id
NO_TOKEN_LEFT = -2


@dataclass(frozen=True)
class ProcessedRow:
    """What changes a row's logits before temperature: the request's rules, and the tokens they look at."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]

    def followed_by(self, token_ids: Sequence[int]) -> ProcessedRow:
        """The same behind these tokens, as if they were output."""
        return replace(self, output_token_ids=[*self.output_token_ids, *token_ids])


_NO_RULES = ProcessedRow(SamplingParams(), (), ())


@dataclass(frozen=True)
class SamplingMetadata:
    """Parameters of the R rows to sample, one entry a row. `output_positions` counts a request's outputs from 0."""

    temperature: np.ndarray  # float64 [R]
    top_k: np.ndarray  # int32 [R], 0 or -1 = off
    top_p: np.ndarray  # float64 [R], in (0, 1]
    min_p: np.ndarray  # float64 [R], in [0, 1], 0 = off
    seeds: np.ndarray  # uint64 [R]
    output_positions: np.ndarray  # int64 [R]
    processed_rows: Mapping[int, ProcessedRow]  # of the R, those with `SamplingParams.changes_logits`
    bitmasks: Mapping[int, np.ndarray] = field(
        default_factory=dict
    )  # of those with a grammar: int32 [cdiv(V, 32)]


class Sampler:
    """Chooses one token a row. It has no state: a draw depends on the row and its parameters alone."""

    def __call__(self, logits: np.ndarray, metadata: SamplingMetadata) -> list[int]:
        """Logits [R, V] -> R token ids; NAN_IN_ROW for a row that contains NaN, NO_TOKEN_LEFT for one without a choice.

        The logits are not changed.
        """
        return [_sample_row(logits[r], metadata, r) for r in range(len(logits))]


def _sample_row(logits: np.ndarray, metadata: SamplingMetadata, r: int) -> int:
    if np.isnan(logits).any():
        return NAN_IN_ROW
    if r in metadata.processed_rows or r in metadata.bitmasks:
        rules, bitmask = metadata.processed_rows.get(r, _NO_RULES), metadata.bitmasks.get(r)
        logits = process_logits(logits, rules.params, rules.prompt_token_ids, rules.output_token_ids, bitmask)
        if logits.max() == -np.inf:
            return NO_TOKEN_LEFT
    temperature = float(metadata.temperature[r])
    if temperature < GREEDY_TEMPERATURE:
        return int(np.argmax(logits))  # argmax returns the first of equals: the lowest id

    z = logits.astype(np.float64) / temperature  # [V]
    kept = _kept_token_ids(
        z, float(metadata.min_p[r]), int(metadata.top_k[r]), float(metadata.top_p[r])
    )  # [K], ascending
    noise = gumbel_noise(int(metadata.seeds[r]), int(metadata.output_positions[r]), len(z))  # [V]
    return int(kept[np.argmax(z[kept] + noise[kept])])


def _kept_token_ids(z: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """Ids that survive min_p, then top-k, then top-p, in ascending order so that argmax keeps the lowest of equals."""
    kept = np.arange(len(z))
    if min_p > 0:
        # p < min_p * p_max says the same of probabilities, whatever else is kept (Nguyen et al., "min-p", 2024).
        kept = kept[z >= z.max() + math.log(min_p)]
    if top_k < 1 and top_p >= 1:
        return kept
    best_first = kept[np.argsort(-z[kept], kind="stable")]  # stable: of equals the lowest id comes first
    if top_k >= 1:
        best_first = best_first[:top_k]
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
