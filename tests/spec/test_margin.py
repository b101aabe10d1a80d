"""How close a decision was, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from reference.contracts.noise import gumbel_noise
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.margin import Decision, decision_margin


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_a_greedy_margin_is_the_gap_of_the_two_best_logits() -> None:
    params = SamplingParams(temperature=0)
    assert decision_margin(row(1.0, 3.5, 2.0), params, 0, 0) == pytest.approx(1.5)
    assert decision_margin(row(2.0, 2.0, 0.0), params, 0, 0) == 0


def test_a_sampled_margin_is_the_gap_of_scaled_logits_plus_noise() -> None:
    logits, seed, position = row(1.0, 3.5, 2.0, 0.5), 7, 3
    scores = np.sort(logits.astype(np.float64) / 0.5 + gumbel_noise(seed, position, 4))
    expected = scores[-1] - scores[-2]
    assert decision_margin(logits, SamplingParams(temperature=0.5), seed, position) == pytest.approx(expected)


def test_a_candidate_close_to_the_top_k_border_makes_the_margin_small() -> None:
    params = SamplingParams(temperature=1.0, top_k=2)
    assert decision_margin(row(9.0, 5.0, 4.99999, 0.0), params, 1, 0) < 1e-4
    assert decision_margin(row(9.0, 5.0, 1.0, 0.0), params, 1, 0) > 1e-2


def test_with_one_token_kept_only_the_border_counts() -> None:
    assert decision_margin(
        row(9.0, 5.0, 1.0), SamplingParams(temperature=2.0, top_k=1), 0, 0
    ) == pytest.approx(2.0)


def test_a_cumulative_probability_close_to_top_p_makes_the_margin_small() -> None:
    logits = row(*np.log([0.5, 0.3, 0.2]))
    assert decision_margin(logits, SamplingParams(top_p=0.500001), 0, 0) < 1e-4
    assert decision_margin(logits, SamplingParams(top_p=0.65), 0, 0) > 1e-4


def test_only_a_small_margin_with_close_logits_is_excused() -> None:
    assert Decision(margin=5e-5, logit_gap=5e-4).is_excused
    assert not Decision(margin=2e-4, logit_gap=5e-4).is_excused
    assert not Decision(margin=5e-5, logit_gap=2e-3).is_excused
