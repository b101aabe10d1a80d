"""The random draws: published test vectors, the mapping of tokens to words, and the range of the noise."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from reference.contracts.noise import derive_seed, gumbel_noise, philox4x32

PI_COUNTER = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI_COUNTER, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_agrees_with_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox4x32(np.array([counter], dtype=np.uint32), key)
    assert tuple(words[0].tolist()) == expected


def test_each_row_of_counters_is_independent_of_the_others() -> None:
    counters = np.arange(40, dtype=np.uint32).reshape(10, 4)
    together = philox4x32(counters, (1, 2))
    alone = [philox4x32(counters[i : i + 1], (1, 2))[0] for i in range(10)]
    assert np.array_equal(together, np.stack(alone))


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 5, 2**64 - 1])
def test_a_token_takes_one_word_of_the_counter_that_its_id_and_position_name(seed: int) -> None:
    position, vocab_size = 3, 11
    noise = gumbel_noise(seed, position, vocab_size)
    for token in range(vocab_size):
        counter = np.array([[token // 4, position, 0, 0]], dtype=np.uint32)
        word = int(philox4x32(counter, (seed % 2**32, seed // 2**32))[0, token % 4])
        u = (word + 0.5) / 2**32
        # Two logarithms of two math libraries: each rounds by at most one unit in the last place.
        assert noise[token] == pytest.approx(-math.log(-math.log(u)), rel=1e-13)


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size() -> None:
    assert np.array_equal(gumbel_noise(5, 2, 10), gumbel_noise(5, 2, 1003)[:10])


def test_seeds_and_positions_all_give_different_noise() -> None:
    rows = {gumbel_noise(seed, position, 8).tobytes() for seed in range(16) for position in range(16)}
    assert len(rows) == 256


def test_both_halves_of_the_seed_matter() -> None:
    rows = {gumbel_noise(seed, 0, 8).tobytes() for seed in (1, 1 << 32, (1 << 32) + 1)}
    assert len(rows) == 3


def test_a_negative_seed_means_its_64_bit_pattern() -> None:
    assert np.array_equal(gumbel_noise(-1, 0, 8), gumbel_noise(2**64 - 1, 0, 8))


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_even_the_extreme_words_give_u_strictly_between_0_and_1_and_finite_noise(
    word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "reference.contracts.noise.philox4x32",
        lambda counter, key: np.full((len(counter), 4), word, np.uint32),
    )
    u = (word + 0.5) * 2.0**-32
    assert 0.0 < u < 1.0
    noise = gumbel_noise(0, 0, 4)
    assert np.all(np.isfinite(noise))
    assert noise == pytest.approx(-math.log(-math.log(u)), rel=1e-6)


def test_the_noise_has_mean_and_variance_of_the_gumbel_distribution() -> None:
    noise = gumbel_noise(seed=0, output_position=0, vocab_size=100_000)
    # Mean: the Euler-Mascheroni constant, standard error sqrt(pi^2/6 / 100000) = 0.0041; five of them allowed.
    assert noise.mean() == pytest.approx(0.57722, abs=0.0205)
    # Variance: pi^2/6, standard error sqrt((kurtosis 5.4 - 1) / 100000) * 1.645 = 0.0109; five of them allowed.
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.0545)


def test_a_derived_seed_is_the_head_of_sha256_of_engine_seed_and_arrival_number() -> None:
    packed = (42).to_bytes(8, "little") + (7).to_bytes(8, "little")
    assert derive_seed(42, 7) == int.from_bytes(hashlib.sha256(packed).digest()[:8], "little")
    assert 0 <= derive_seed(42, 7) < 2**64


def test_derived_seeds_differ_between_arrivals_and_between_engines() -> None:
    assert len({derive_seed(engine, arrival) for engine in range(20) for arrival in range(20)}) == 400
