"""What happens to logits before temperature, on both tiers: masks, bias, penalties, their order and their rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from reference.contracts.logits import process_logits
from reference.contracts.sampling_params import SamplingParams
from tests.spec.test_sampler import TierSampler, random_logits

Rules = tuple[SamplingParams, Sequence[int], Sequence[int]]


@pytest.fixture
def sampler(tier_name: str) -> TierSampler:
    return TierSampler(tier_name)


def rules(
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
    bad_words_ids: Sequence[Sequence[int]] = (),
    **params: Any,
) -> Rules:
    return SamplingParams(**params).resolved(eos, bad_words_ids), prompt, output


def greedy(sampler: TierSampler, row: Sequence[float], **options: Any) -> int:
    return sampler([row], temperature=0.0, processed={0: rules(**options)})[0]


def processed(row: Sequence[float], **options: Any) -> list[float]:
    params, prompt, output = rules(**options)
    return process_logits(np.array(row, np.float32), params, prompt, output).tolist()


# Penalties. B27: which tokens a penalty looks at.


def test_b27_repetition_divides_positive_logits_and_multiplies_negative_ones() -> None:
    assert processed([2.0, -2.0, 2.0], prompt=[0, 1], repetition_penalty=1.5) == [
        pytest.approx(1.333, abs=1e-3),
        -3.0,
        2.0,
    ]


def test_b27_repetition_looks_at_the_prompt_from_the_first_token_on(sampler: TierSampler) -> None:
    row = [2.0, 1.5, -2.0, -2.5]
    assert greedy(sampler, row, prompt=[0, 0], repetition_penalty=1.5) == 1
    assert greedy(sampler, row, prompt=[3], output=[0], repetition_penalty=1.5) == 1
    assert greedy(sampler, row[2:], prompt=[0], repetition_penalty=1.2) == 0  # -2.4
    assert greedy(sampler, row[2:], prompt=[0], repetition_penalty=1.5) == 1  # -3


def test_b27_presence_and_frequency_look_at_the_output_only(sampler: TierSampler) -> None:
    row = [2.0, 1.5]
    for name in ("presence_penalty", "frequency_penalty"):
        assert greedy(sampler, row, prompt=[0] * 9, **{name: 1.0}) == 0
        assert greedy(sampler, row, prompt=[1], output=[0], **{name: 1.0}) == 1


def test_presence_counts_once_and_frequency_every_time(sampler: TierSampler) -> None:
    row, output = [2.0, 1.0], [0, 0, 0]
    assert greedy(sampler, row, output=output, presence_penalty=0.5) == 0
    assert greedy(sampler, row, output=output, frequency_penalty=0.5) == 1
    assert processed(row, output=output, presence_penalty=0.5, frequency_penalty=0.25) == [0.75, 1.0]


def test_a_negative_penalty_makes_repetition_likelier(sampler: TierSampler) -> None:
    assert greedy(sampler, [1.0, 2.0], output=[0], presence_penalty=-1.5) == 0
    assert greedy(sampler, [1.0, 2.0], output=[0, 0], frequency_penalty=-0.75) == 0
    assert greedy(sampler, [1.0, 1.5], prompt=[0], repetition_penalty=0.5) == 0


def test_repetition_comes_before_presence_and_frequency_and_bias_before_all() -> None:
    # ((1 + 2) / 1.5 - 2 * 0.25) - 0.5 = 1; any other order gives another number.
    options: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    assert processed([1.0, 0.0], output=[0, 0], logit_bias={0: 2.0}, **options) == [1.0, 0.0]


def test_penalties_are_float64_rounded_once() -> None:
    logit, count = np.float32(3.3), 7
    expected = np.float32(float(logit) / 1.7 - 0.3 * count - 0.9)
    assert processed(
        [logit, 0.0], output=[0] * count, repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=0.9
    )[0] == float(expected)


def test_what_would_leave_float32_stays_finite_and_stays_eligible(sampler: TierSampler) -> None:
    largest = float(np.finfo(np.float32).max)
    assert processed([1.0, -1.0], prompt=[0, 1], repetition_penalty=1e-300) == [
        largest,
        pytest.approx(-1e-300),
    ]
    assert processed([-1.0], prompt=[0], repetition_penalty=1e300) == [-largest]
    params: dict[str, Any] = {"prompt": [0, 1], "repetition_penalty": 1e300}
    assert greedy(sampler, [-1.0, -1.0, -np.inf], **params) == 0
    draws = sampler.draws(
        [1.0, 2.0, 0.0],
        50,
        top_p=0.9,
        processed={r: rules(prompt=[0, 1], repetition_penalty=1e-300) for r in range(50)},
    )
    assert set(draws) == {0}  # both at the largest number, where any noise vanishes: the lower id


# Bias and masks


def test_a_bias_is_added_to_its_token_only(sampler: TierSampler) -> None:
    row = [1.0, 2.0, 3.0]
    assert greedy(sampler, row, logit_bias={0: 2.5}) == 0
    assert greedy(sampler, row, logit_bias={2: -1.5}) == 1
    assert greedy(sampler, row, logit_bias={0: -100, 2: 0}) == 2


def test_only_allowed_tokens_are_drawn(sampler: TierSampler) -> None:
    row = random_logits(1, 50, seed=1)[0]
    allowed = [7, 3, 40, 7]
    assert greedy(sampler, row.tolist(), allowed_token_ids=allowed) == max({3, 7, 40}, key=lambda i: row[i])
    all_rows = {r: rules(allowed_token_ids=allowed) for r in range(300)}
    assert set(sampler.draws(row, 300, temperature=50.0, processed=all_rows)) == {3, 7, 40}
    assert set(sampler.draws(row, 300, temperature=50.0, top_k=49, top_p=0.999, processed=all_rows)) <= {
        3,
        7,
        40,
    }


def test_a_masked_token_cannot_be_biased_back(sampler: TierSampler) -> None:
    assert greedy(sampler, [5.0, 1.0], allowed_token_ids=[1], logit_bias={0: 100}) == 1
    assert greedy(sampler, [5.0, 1.0], bad_words_ids=[[0]], logit_bias={0: 100}) == 1
    assert greedy(sampler, [5.0, 1.0], eos=[0], min_tokens=1, logit_bias={0: 100}) == 1
    assert greedy(sampler, [5.0, 1.0], output=[0], bad_words_ids=[[0]], repetition_penalty=0.01) == 1


def test_a_bad_word_of_one_token_is_never_drawn(sampler: TierSampler) -> None:
    for output in ([], [0], [1]):
        assert greedy(sampler, [5.0, 1.0], output=output, bad_words_ids=[[0]]) == 1


def test_the_last_token_of_a_bad_word_is_masked_when_the_output_ends_with_its_others(
    sampler: TierSampler,
) -> None:
    row, word = [5.0, 1.0, 0.0, 0.0], [[2, 3, 0]]
    assert greedy(sampler, row, output=[2, 3], bad_words_ids=word) == 1
    assert greedy(sampler, row, output=[1, 1, 2, 3], bad_words_ids=word) == 1
    for other in ([], [3], [3, 2], [2, 3, 1], [2, 1, 3]):
        assert greedy(sampler, row, output=other, bad_words_ids=word) == 0
    assert greedy(sampler, row, prompt=[2, 3], bad_words_ids=word) == 0, "the prompt is no part of the output"
    assert greedy(sampler, row, prompt=[2], output=[3], bad_words_ids=word) == 0
    assert greedy(sampler, row, output=[0], bad_words_ids=[[0, 0]]) == 1


def test_min_tokens_masks_end_of_sequence_and_stop_tokens_until_they_are_there(sampler: TierSampler) -> None:
    row = [9.0, 8.0, 7.0, 1.0]
    options: dict[str, Any] = {"eos": [0, 1], "stop_token_ids": [2], "min_tokens": 2}
    assert greedy(sampler, row, **options) == 3
    assert greedy(sampler, row, output=[3], **options) == 3
    assert greedy(sampler, row, output=[3, 3], **options) == 0
    assert greedy(sampler, row, **options, ignore_eos=True) == 3


def test_masks_that_leave_nothing_give_minus_two_and_nan_still_gives_minus_one(sampler: TierSampler) -> None:
    nothing = rules(
        allowed_token_ids=[0], output=[1, 0, 1], bad_words_ids=[[1, 0]], logit_bias={0: 9}, presence_penalty=1
    )
    for temperature in (0.0, 1.0):
        for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
            rows = [[2.0, 1.0], [2.0, np.nan], [2.0, 1.0]]
            tokens = sampler(
                rows,
                temperature=temperature,
                processed={0: nothing, 1: nothing},
                **options,  # type: ignore[arg-type]
            )
            assert tokens[:2] == [-2, -1]
            assert tokens[2] in (0, 1)


# All together


def random_rules(seed: int, vocab_size: int) -> Rules:
    rng = np.random.default_rng(seed)

    def ids(most: int, least: int = 0) -> list[int]:
        return rng.integers(0, vocab_size, rng.integers(least, most + 1)).tolist()

    output = ids(12)
    words = [ids(1, 1), [*output[-2:], *ids(1, 1)]]
    return rules(
        prompt=ids(30),
        output=output,
        eos=ids(2),
        bad_words_ids=words if rng.random() < 0.5 else [],
        min_tokens=int(rng.choice([0, 8])),
        logit_bias={i: float(rng.normal(0, 5)) for i in ids(5)},
        allowed_token_ids=ids(vocab_size, vocab_size // 2) if rng.random() < 0.3 else None,
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        presence_penalty=float(rng.choice([0.0, 0.7, -0.4])),
        frequency_penalty=float(rng.choice([0.0, 0.3, -0.2])),
    )


def test_rows_with_and_without_rules_do_not_influence_each_other(sampler: TierSampler) -> None:
    count, vocab_size = 40, 60
    logits = random_logits(count, vocab_size, seed=3)
    rows = {r: random_rules(r, vocab_size) for r in range(count) if r % 3}
    params: dict[str, list[Any]] = {
        "temperature": [0.0 if r % 4 == 0 else 1.2 for r in range(count)],
        "top_k": [0 if r % 5 else 7 for r in range(count)],
        "top_p": [1.0 if r % 7 else 0.8 for r in range(count)],
        "min_p": [0.0 if r % 6 else 0.1 for r in range(count)],
        "seed": list(range(count)),
        "position": list(range(count)),
    }
    together = sampler(logits, processed=rows, **params)
    for r in range(count):
        own = {name: values[r] for name, values in params.items()}
        alone = sampler(logits[r : r + 1], processed={0: rows[r]} if r in rows else {}, **own)
        by_hand = process_logits(logits[r], *rows[r]) if r in rows else logits[r]
        assert together[r] == alone[0] == sampler([by_hand], **own)[0]
