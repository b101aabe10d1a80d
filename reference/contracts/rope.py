"""Rotary frequencies of every scaling type. Written once: a tier that turned by other angles would be another model.

Each number pair of a head turns by `position * frequency` radians; the frequencies of a head form a geometric series
from 1 down to about 1 / theta. A scaled model was trained (or tuned) with some of them lowered, so that far positions
meet angles it knows:

    linear   all by `factor`: positions are squeezed together
    llama3   those that turn less than `low_freq_factor` times in the original length by `factor`, those that turn more
             than `high_freq_factor` times not at all, those between in part
    yarn     the same idea by place in the head, between those that turn `beta_fast` and `beta_slow` times; and the
             scores are sharpened by `attention_factor`

Sources: kaiokendev's SuperHOT (2023, linear); Peng et al., "YaRN" (2023); Llama 3.1's reference code; formulas and
float32 as in transformers' `modeling_rope_utils.py`.
"""

from __future__ import annotations

import math

import numpy as np

from reference.contracts.config import RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """float32 [D/2], radians per position; pair i turns with frequency i."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)  # [D/2]
    frequencies: np.ndarray = np.float32(1) / np.float32(theta) ** exponents  # [D/2]
    if scaling is None:
        return frequencies
    lowered = frequencies / np.float32(scaling.factor)  # [D/2]
    if scaling.rope_type == "linear":
        return lowered
    if scaling.rope_type == "llama3":
        kept = _llama3_share(frequencies, scaling)
    else:
        kept = _yarn_share(head_dim, theta, scaling)
    mixed: np.ndarray = (np.float32(1) - kept) * lowered + kept * frequencies
    return mixed  # [D/2]


def _llama3_share(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """How much of each frequency stays as it was: float32 [D/2], 0 to 1, by the turns in the original length."""
    turns = scaling.original_max_position_embeddings * frequencies / np.float32(2 * math.pi)  # [D/2]
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    return np.clip((turns - low) / (high - low), 0, 1)


def _yarn_share(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """How much of each frequency stays as it was: float32 [D/2], 1 falling to 0 between two places in the head."""

    def place(turns: float) -> float:
        """Index of the pair that turns so many times in the original length."""
        original = scaling.original_max_position_embeddings
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    share: np.ndarray = np.float32(1) - np.clip(ramp, 0, 1)
    return share
