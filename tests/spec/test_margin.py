"""How close a decision was, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from reference.frontend.margin import Decision, decision_margin


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def margin(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    noise: tuple[float, ...] = (),
    min_p: float = 0.0,
) -> float:
    return decision_margin(logits, temperature, top_k, top_p, np.array(noise or (0.0,) * len(logits)), min_p)


def test_a_greedy_margin_is_the_gap_of_the_two_best_logits_and_reads_no_noise() -> None:
    assert margin(row(1.0, 3.5, 2.0), temperature=0, noise=(9.0, 0.0, 0.0)) == pytest.approx(1.5)
    assert margin(row(2.0, 2.0, 0.0), temperature=0) == 0
    assert margin(row(2.0, 1.0), temperature=9e-6) == pytest.approx(1.0)  # still greedy: nothing is divided


def test_a_sampled_margin_is_the_gap_of_scaled_logits_plus_noise() -> None:
    # Scores 2 + 0.5, 7 - 4, 4 + 0: the best two are 4 and 3.
    assert margin(row(1.0, 3.5, 2.0), temperature=0.5, noise=(0.5, -4.0, 0.0)) == pytest.approx(1.0)


def test_a_candidate_close_to_the_top_k_border_makes_the_margin_small() -> None:
    assert margin(row(9.0, 5.0, 4.99999, 0.0), top_k=2) == pytest.approx(1e-5, rel=0.1)
    assert margin(row(9.0, 5.0, 1.0, 0.0), top_k=2, noise=(0.0, 3.0, 9.0, 9.0)) == pytest.approx(1.0)


def test_a_top_k_of_the_whole_vocabulary_or_more_has_no_border() -> None:
    assert margin(row(9.0, 5.0, 4.99999), top_k=3) == pytest.approx(4.0)
    assert margin(row(9.0, 5.0, 4.99999), top_k=-1) == pytest.approx(4.0)


def test_with_one_token_kept_only_the_border_counts() -> None:
    assert margin(row(9.0, 5.0, 1.0), temperature=2.0, top_k=1) == pytest.approx(2.0)


def test_a_vocabulary_of_one_token_leaves_nothing_to_choose() -> None:
    assert margin(row(4.0), temperature=0) == float("inf")
    assert margin(row(4.0), top_p=0.5) == float("inf")


def test_the_distance_to_top_p_is_that_of_the_cumulative_probability_in_units_of_the_scores() -> None:
    logits, far = row(*np.log([0.5, 0.3, 0.2])), (50.0, 0.0, 0.0)  # the draw itself is never close
    # Two are kept. From 0.65 down to 0.5 is 0.15, up to 0.8 as well; divided by c (1 - c) = 0.25 and 0.16 that is
    # 0.6 and 0.9375, and the gap to the third is log(0.3 / 0.2) = 0.405, the smallest.
    assert margin(logits, top_p=0.65, noise=far) == pytest.approx(np.log(1.5), rel=1e-5)
    # 0.5 falls short by 0.02, which is 0.08 in scores.
    assert margin(logits, top_p=0.52, noise=far) == pytest.approx(0.08, rel=1e-4)
    # 0.8 reaches it by 0.01: 0.01 / 0.16.
    assert margin(logits, top_p=0.79, noise=far) == pytest.approx(0.0625, rel=1e-4)
    assert margin(logits, top_p=0.500001, noise=far) < 1e-4


def test_top_p_works_on_the_probabilities_of_what_top_k_kept() -> None:
    logits = row(*np.log([0.5, 0.25, 0.25 - 1e-3, 1e-3]))
    # Of the best two, renormalised, the first has 2/3: with top_p 0.7 both are kept, short by 0.0333 / (2/9) = 0.15.
    assert margin(logits, top_k=2, top_p=0.7, noise=(50.0, 0, 0, 0)) == pytest.approx(
        np.log(0.25 / 0.249), rel=1e-3
    )
    assert margin(row(*np.log([0.5, 0.25, 0.01])), top_k=2, top_p=0.7, noise=(50.0, 0, 0)) == pytest.approx(
        0.15, rel=1e-4
    )


def test_the_distance_to_min_p_is_that_of_the_nearest_candidate_to_the_border() -> None:
    logits, far = row(*np.log([0.5, 0.3, 0.2])), (50.0, 0.0, 0.0)
    # Borders at 0.5 * 0.61 and 0.5 * 0.42: the nearest are 0.3 and 0.2.
    assert margin(logits, min_p=0.61, noise=far) == pytest.approx(np.log(0.61 / 0.6), rel=1e-3)
    assert margin(logits, min_p=0.42, noise=far) == pytest.approx(np.log(0.42 / 0.4), rel=1e-3)
    # Two are left for top-p: 0.625 and 0.375. 0.7 is short by 0.075 / (0.625 * 0.375).
    assert margin(logits, min_p=0.5, top_p=0.7, noise=far) == pytest.approx(np.log(0.6 / 0.5), rel=1e-3)
    assert margin(logits, min_p=1.0, noise=far) == pytest.approx(np.log(0.5 / 0.3), rel=1e-3)


def test_masked_tokens_have_no_border_and_are_no_rivals() -> None:
    masked = -np.inf
    with np.errstate(invalid="raise"):  # the distance between two masked tokens is no number
        assert margin(row(3.0, masked, masked), temperature=0) == float("inf")
        assert margin(row(3.0, masked, masked), top_k=2, top_p=0.9, min_p=0.1) == float("inf")
        assert margin(row(3.0, 2.0, masked, masked), top_k=3) == pytest.approx(1.0)
    assert margin(row(3.0, masked, 1.0, masked), top_k=2) == pytest.approx(2.0)
    assert margin(row(3.0, masked, 1.0, masked), top_k=1, temperature=2.0) == pytest.approx(1.0)


def test_only_a_small_margin_with_close_logits_is_excused() -> None:
    assert Decision(margin=5e-5, logit_gap=5e-4).is_excused
    assert not Decision(margin=2e-4, logit_gap=5e-4).is_excused
    assert not Decision(margin=5e-5, logit_gap=2e-3).is_excused
