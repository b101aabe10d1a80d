"""The sampler: the fixed order temperature -> min_p -> top-k -> top-p -> draw, its borders and its ties, on both tiers.

What comes before temperature is in `test_logits.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from reference.contracts.noise import gumbel_noise
from reference.contracts.sampling_params import SamplingParams
from tests.tier_arrays import as_tier_array


class TierSampler:
    """Calls a tier's sampler with NumPy logits and plain numbers; one number stands for all rows."""

    def __init__(self, tier_name: str) -> None:
        self.tier_name = tier_name
        self.module = importlib.import_module(f"{tier_name}.sampler")

    def __call__(
        self,
        logits: Sequence[Sequence[float]] | np.ndarray,
        temperature: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        seed: int | Sequence[int] = 0,
        position: int | Sequence[int] = 0,
        min_p: float | Sequence[float] = 0.0,
        processed: Mapping[int, tuple[SamplingParams, Sequence[int], Sequence[int]]] | None = None,
    ) -> list[int]:
        rows = np.asarray(logits, dtype=np.float32)  # [R, V]

        def column(value: Any, dtype: type) -> Any:
            return as_tier_array(self.tier_name, np.broadcast_to(np.array(value, dtype=dtype), len(rows)))

        metadata = self.module.SamplingMetadata(
            temperature=column(temperature, np.float64),
            top_k=column(top_k, np.int32),
            top_p=column(top_p, np.float64),
            min_p=column(min_p, np.float64),
            seeds=column(seed, np.uint64),
            output_positions=column(position, np.int64),
            processed_rows={r: self.module.ProcessedRow(*rules) for r, rules in (processed or {}).items()},
        )
        return list(self.module.Sampler()(as_tier_array(self.tier_name, rows), metadata))

    def draws(self, row: Sequence[float] | np.ndarray, count: int, **params: Any) -> list[int]:
        """Tokens of one row at output positions 0 .. count - 1."""
        return self(np.tile(np.asarray(row, dtype=np.float32), (count, 1)), position=range(count), **params)


@pytest.fixture
def sampler(tier_name: str) -> TierSampler:
    return TierSampler(tier_name)


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab_size)).astype(np.float32)


# Greedy


def test_greedy_takes_the_largest_logit_of_each_row(sampler: TierSampler) -> None:
    logits = random_logits(16, 1000)
    assert sampler(logits, temperature=0.0) == logits.argmax(axis=1).tolist()


def test_greedy_breaks_ties_to_the_lowest_id(sampler: TierSampler) -> None:
    row = np.zeros(1000)
    row[[17, 400, 999]] = 5.0
    assert sampler([row], temperature=0.0) == [17]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-8, 9.99e-6])
def test_a_tiny_temperature_is_greedy_whatever_the_other_parameters_say(
    sampler: TierSampler, temperature: float
) -> None:
    logits = random_logits(8, 300, seed=1) * np.float32(1e30)
    expected = logits.argmax(axis=1).tolist()
    assert sampler(logits, temperature=temperature, top_k=5, top_p=0.9, seed=3, position=9) == expected


def test_the_smallest_temperature_that_is_not_greedy_does_not_overflow(sampler: TierSampler) -> None:
    logits = random_logits(8, 300, seed=2) * np.float32(1e37)  # divided by 1e-5 this leaves float32
    assert sampler(logits, temperature=1e-5, top_k=7, top_p=0.9) == logits.argmax(axis=1).tolist()


# Top-k


def test_top_k_of_one_is_greedy_at_any_temperature(sampler: TierSampler) -> None:
    row = random_logits(1, 500, seed=3)[0]
    assert set(sampler.draws(row, 50, temperature=100.0, top_k=1)) == {int(row.argmax())}


def test_top_k_draws_from_the_k_best_and_from_all_of_them(sampler: TierSampler) -> None:
    row = random_logits(1, 500, seed=4)[0]
    best = set(np.argsort(-row)[:5].tolist())
    # A temperature of 100 makes the five nearly equal: each is missed by 200 draws with probability 0.8^200 = 4e-20.
    assert set(sampler.draws(row, 200, temperature=100.0, top_k=5)) == best


def test_top_k_keeps_the_lowest_ids_among_equals(sampler: TierSampler) -> None:
    row = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert set(sampler.draws(row, 100, top_k=2)) == {1, 3}
    assert set(sampler.draws(row, 400, top_k=5, temperature=10.0)) == {0, 1, 3, 5, 7}


@pytest.mark.parametrize("top_k", [-1, 0, 40, 41, 10**9])
def test_top_k_that_is_off_or_covers_the_vocabulary_changes_nothing(sampler: TierSampler, top_k: int) -> None:
    row = random_logits(1, 40, seed=5)[0]
    z = row.astype(np.float64)
    expected = [int(np.argmax(z + gumbel_noise(0, position, 40))) for position in range(50)]
    assert sampler.draws(row, 50, top_k=top_k) == expected


# Top-p. Equal logits make the probabilities exact: 1/4 each, cumulative 1/4, 1/2, 3/4, 1.


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.25, {0}),
        (0.2500001, {0, 1}),
        (0.5, {0, 1}),
        (0.4999999, {0, 1}),
        (0.5000001, {0, 1, 2}),
        (0.75, {0, 1, 2}),
        (0.7500001, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_the_nucleus_is_the_smallest_prefix_that_reaches_top_p(
    sampler: TierSampler, top_p: float, kept: set[int]
) -> None:
    # Each kept token is missed by 200 draws with probability at most 0.75^200 = 1e-25.
    assert set(sampler.draws([1.5] * 4, 200, top_p=top_p)) == kept


def test_the_nucleus_takes_the_most_probable_first_and_equals_by_lowest_id(sampler: TierSampler) -> None:
    row = [0.0, 2.0, 0.0, 2.0, 0.0, 2.0]
    # Probability of each 2.0: e^2 / (3 e^2 + 3) = 0.294; two of them reach 0.5, three reach 0.6.
    assert set(sampler.draws(row, 200, top_p=0.5)) == {1, 3}
    assert set(sampler.draws(row, 200, top_p=0.6)) == {1, 3, 5}


def test_top_p_keeps_at_least_one_token(sampler: TierSampler) -> None:
    row = random_logits(1, 1000, seed=6)[0]
    assert set(sampler.draws(row, 50, temperature=50.0, top_p=1e-12)) == {int(row.argmax())}


def test_top_p_of_one_keeps_even_tokens_whose_probability_vanishes_in_the_sum(sampler: TierSampler) -> None:
    # After the first token the running sum is already 1.0 in float64; the noise still decides among all.
    row = [40.0, 0.0]
    z = np.array(row)
    for position in range(20):
        expected = int(np.argmax(z + gumbel_noise(0, position, 2)))
        assert sampler([row], position=position) == [expected]


# Min-p. Of logits log(w) the probabilities are in the ratios of w.


def log_weights(*weights: float) -> list[float]:
    return [float(np.log(w)) for w in weights]


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, {0, 1, 2, 3}), (0.2, {0, 1, 2}), (0.45, {0, 1}), (0.55, {0}), (1.0, {0})]
)
def test_min_p_drops_what_is_less_likely_than_a_fraction_of_the_best(
    sampler: TierSampler, min_p: float, kept: set[int]
) -> None:
    # The least likely, 1/19 of the mass, is missed by 400 draws with probability (18/19)^400 = 4e-10.
    assert set(sampler.draws(log_weights(10, 5, 3, 1), 400, min_p=min_p)) == kept


def test_min_p_of_one_keeps_all_that_equal_the_best(sampler: TierSampler) -> None:
    assert set(sampler.draws([0.0, 2.0, 1.9, 2.0], 200, min_p=1.0)) == {1, 3}


def test_min_p_measures_probabilities_after_temperature(sampler: TierSampler) -> None:
    row = log_weights(16, 4, 1)  # at T = 2 the ratios are 4, 2, 1
    assert set(sampler.draws(row, 300, min_p=0.3)) == {0}
    assert set(sampler.draws(row, 300, min_p=0.3, temperature=2.0)) == {0, 1}


def test_top_k_and_top_p_work_on_what_min_p_kept(sampler: TierSampler) -> None:
    row = [0.0] * 4 + log_weights(*[0.5] * 8)  # of all, four equals hold half; min_p leaves them alone
    assert set(sampler.draws(row, 200, min_p=0.6, top_p=0.5)) == {0, 1}
    assert set(sampler.draws(row, 200, min_p=0.6, top_k=3)) == {0, 1, 2}
    assert set(sampler.draws(row, 200, min_p=0.6, top_k=100)) == {0, 1, 2, 3}


def test_greedy_reads_no_min_p(sampler: TierSampler) -> None:
    assert sampler([[1.0, 3.0, 2.0]], temperature=0.0, min_p=1.0) == [1]


# Order


def test_top_p_measures_probabilities_among_the_tokens_that_top_k_kept(sampler: TierSampler) -> None:
    # Among 4 of 8 equals each has 1/4, so half the mass is two tokens; over all 8 it would be four.
    assert set(sampler.draws([0.0] * 8, 200, top_k=4, top_p=0.5)) == {0, 1}


def test_top_p_measures_probabilities_after_temperature(sampler: TierSampler) -> None:
    row = [2.0, 0.0, 0.0, 0.0]
    # At T = 1 the first has e^2 / (e^2 + 3) = 0.711; at T = 2 e / (e + 3) = 0.475, and each other 0.175.
    assert set(sampler.draws(row, 200, temperature=1.0, top_p=0.7)) == {0}
    assert set(sampler.draws(row, 200, temperature=2.0, top_p=0.7)) == {0, 1, 2}


# The draw


def test_a_draw_is_the_argmax_of_scaled_logits_plus_gumbel_noise(sampler: TierSampler) -> None:
    vocab_size, temperature = 1001, 0.7  # not a multiple of four: the last counter is used in part
    logits = random_logits(24, vocab_size, seed=7)
    seeds = [2**64 - 1 - i if i % 2 else i for i in range(24)]
    positions = [3 * i for i in range(24)]
    z = logits.astype(np.float64) / temperature
    expected = [
        int(np.argmax(z[r] + gumbel_noise(seeds[r], positions[r], vocab_size))) for r in range(len(logits))
    ]
    assert sampler(logits, temperature=temperature, seed=seeds, position=positions) == expected


def test_draws_follow_the_softmax_of_the_scaled_logits(sampler: TierSampler) -> None:
    row, temperature, count = np.array([0.0, 1.0, 2.0, -1.0, 0.5, 3.0]), 1.5, 4000
    probabilities = np.exp(row / temperature) / np.exp(row / temperature).sum()
    tokens = sampler.draws(row, count, temperature=temperature, seed=1)
    frequencies = np.bincount(tokens, minlength=len(row)) / count
    # Hoeffding: P(|frequency - p| >= 0.05) <= 2 exp(-2 * 4000 * 0.05^2) = 4e-9 a token. The seed is fixed, so the
    # outcome is the same in every run.
    assert np.abs(frequencies - probabilities).max() < 0.05


def test_the_same_seed_gives_the_same_draws_and_another_seed_gives_others(sampler: TierSampler) -> None:
    row = [0.0] * 100
    assert sampler.draws(row, 20, seed=5) == sampler.draws(row, 20, seed=5)
    assert sampler.draws(row, 20, seed=5) != sampler.draws(row, 20, seed=6)


def test_a_draw_does_not_depend_on_the_batch_around_it(sampler: TierSampler) -> None:
    logits = random_logits(6, 257, seed=8)
    params: dict[str, list[Any]] = {
        "temperature": [0.0, 0.5, 1.0, 1.5, 2.0, 0.9],
        "top_k": [0, 10, -1, 300, 3, 50],
        "top_p": [1.0, 0.9, 0.5, 1.0, 0.99, 0.8],
        "min_p": [0.1, 0.0, 0.01, 0.2, 0.0, 0.05],
        "seed": [0, 1, 2, 3, 2**63, 5],
        "position": [0, 4, 2, 0, 1, 7],
    }
    together = sampler(logits, **params)
    alone = [
        sampler(logits[r : r + 1], **{name: values[r] for name, values in params.items()})[0]
        for r in range(6)
    ]
    backwards = sampler(logits[::-1].copy(), **{name: values[::-1] for name, values in params.items()})
    assert together == alone == backwards[::-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_gives_minus_one_and_leaves_the_others_alone(
    sampler: TierSampler, temperature: float
) -> None:
    logits = random_logits(3, 100, seed=9)
    healthy = sampler(logits, temperature=temperature, top_k=20, top_p=0.9)
    logits[1, 99] = np.nan
    poisoned = sampler(logits, temperature=temperature, top_k=20, top_p=0.9)
    assert poisoned == [healthy[0], -1, healthy[2]]


def test_a_logit_of_minus_infinity_is_never_drawn(sampler: TierSampler) -> None:
    row = [-np.inf, 0.0, -np.inf, 0.0]
    assert set(sampler.draws(row, 100, temperature=5.0)) == {1, 3}
    assert set(sampler.draws(row, 100, temperature=5.0, top_k=3, top_p=0.99)) == {1, 3}


def test_no_rows_give_no_tokens(sampler: TierSampler) -> None:
    assert sampler(np.zeros((0, 10), dtype=np.float32)) == []
