"""process_logits, sample, gumbel_noise, philox4x32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fast import kernels
from tests.kernels import oracles

KNOWN_ANSWERS = [  # of philox4x32-10, published with Random123 (kat_vectors): counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# Temperature, top_k, top_p: each filter off, loose, tight, and both together.
SETTINGS = [
    (1.0, 0, 1.0),
    (1.0, -1, 1.0),
    (0.3, 0, 1.0),
    (1.7, 40, 1.0),
    (1.0, 1, 1.0),
    (1.0, 10**6, 1.0),
    (1.0, 0, 0.9),
    (0.7, 0, 0.3),
    (1.0, 0, 1e-6),
    (2.0, 0, 0.999999),
    (0.8, 20, 0.95),
    (1.3, 3, 0.5),
    (1e-5, 0, 0.9),
]


def random_logits(rows: int, vocab_size: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def sample(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    position: int = 0,
    min_p: float = 0.0,
    on: Any = kernels,
) -> list[int]:
    """One token a row; row r is the draw at output position `position + r`."""
    rows = logits.shape[0]
    out = torch.full((rows,), -7)
    on.sample(
        logits,
        torch.full((rows,), temperature, dtype=torch.float64),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), min_p, dtype=torch.float64),
        torch.full((rows,), seed),
        torch.arange(position, position + rows),
        out,
    )
    return out.tolist()


def expected(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int = 0,
    min_p: float = 0.0,
) -> list[int]:
    return [
        oracles.sample(row, temperature, top_k, top_p, seed, position + r, min_p)
        for r, row in enumerate(logits.double().numpy())
    ]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert kernels.philox4x32(counter, key) == words
    assert oracles.philox4x32_10(counter, key) == words


def test_philox_refuses_words_of_more_than_32_bits() -> None:
    with pytest.raises(ValueError, match="expected unsigned 32-bit words"):
        kernels.philox4x32((0, 0, 0, 2**32), (0, 0))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 4000, 2**32 - 1])
@pytest.mark.parametrize("vocab_size", [1, 6, 257])
def test_the_noise_equals_the_formula(seed: int, position: int, vocab_size: int) -> None:
    noise = torch.full((vocab_size,), float("nan"), dtype=torch.float64)
    kernels.gumbel_noise(seed, position, noise)
    # Two logarithms, each within a few units in the last place of NumPy's.
    np.testing.assert_allclose(
        noise.numpy(), oracles.gumbel_noise(seed, position, vocab_size), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("bad", [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_the_noise_refuses_numbers_out_of_range(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"(seed|output_position): expected an unsigned"):
        kernels.gumbel_noise(*bad, torch.empty(4, dtype=torch.float64))


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 50, 1001])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.6, 1.0])
def test_tokens_equal_the_oracle(
    temperature: float, top_k: int, top_p: float, vocab_size: int, min_p: float
) -> None:
    logits = random_logits(6, vocab_size, seed=vocab_size)
    assert sample(logits, temperature, top_k, top_p, seed=3, min_p=min_p) == expected(
        logits, temperature, top_k, top_p, seed=3, min_p=min_p
    )


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_tokens_equal_the_oracle_when_many_logits_are_equal(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = random_logits(8, 120, seed=0).round()
    assert sample(logits, temperature, top_k, top_p, seed=1) == expected(
        logits, temperature, top_k, top_p, seed=1
    )


def test_a_kept_set_is_exactly_the_oracles() -> None:
    """With equal logits only the noise decides, so enough draws visit every kept token, and no other."""
    logits = torch.zeros(400, 30)
    logits[:, 10:] = -0.01
    for top_k, top_p in [(7, 1.0), (20, 1.0), (0, 0.5), (25, 0.3), (29, 1.0)]:
        kept = oracles.kept_tokens(logits[0].double().numpy(), 1.0, top_k, top_p)
        assert set(sample(logits, 1.0, top_k, top_p)) == set(kept.tolist())
    for top_k, top_p, min_p in [(0, 1.0, 0.995), (5, 1.0, 0.995), (0, 0.25, 0.995), (25, 0.3, 0.5)]:
        kept = oracles.kept_tokens(logits[0].double().numpy(), 1.0, top_k, top_p, min_p)
        assert set(sample(logits, 1.0, top_k, top_p, min_p=min_p)) == set(kept.tolist())


def test_top_p_stops_at_the_token_that_reaches_it() -> None:
    logits = torch.zeros(200, 4)  # a quarter each, exact in binary: two tokens reach a half
    assert set(sample(logits, top_p=0.5)) == {0, 1}
    assert set(sample(logits, top_p=0.5 + 1e-9)) == {0, 1, 2}


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_draw_from_a_large_vocabulary_is_the_plain_argmax_of_logits_plus_noise(
    spread: float, seed: int
) -> None:
    logits = random_logits(4, 49152, seed, spread)
    noise = torch.empty(49152, dtype=torch.float64)
    for r, token in enumerate(sample(logits, 0.8, seed=seed)):
        kernels.gumbel_noise(seed, r, noise)
        assert token == int((logits[r].double() / 0.8 + noise).argmax())


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.9), (0, 0.2), (50, 1.0), (2000, 1.0), (20000, 1.0), (3000, 0.9)]
)
def test_filters_on_a_large_vocabulary_equal_the_oracle(top_k: int, top_p: float) -> None:
    logits = random_logits(2, 49152, seed=0, spread=3.0)
    noise = torch.empty(49152, dtype=torch.float64)
    for r, token in enumerate(sample(logits, 1.0, top_k, top_p, seed=9)):
        kept = np.sort(oracles.kept_tokens(logits[r].double().numpy(), 1.0, top_k, top_p))
        kernels.gumbel_noise(9, r, noise)
        assert token == kept[np.argmax(logits[r].double().numpy()[kept] + noise.numpy()[kept])]


@pytest.mark.parametrize("temperature", [0.0, 9.9e-6])
@pytest.mark.parametrize("vocab_size", [1, 3, 16, 33, 1000])
def test_a_temperature_below_1e_5_takes_the_first_of_the_largest_logits(
    temperature: float, vocab_size: int
) -> None:
    logits = random_logits(5, vocab_size, seed=0).round()
    tokens = sample(logits, temperature, top_k=5, top_p=0.5, seed=4)
    assert tokens == [int(np.argmax(row)) for row in logits.numpy()]


@pytest.mark.parametrize(
    "settings", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 9, 1.0), (1.0, 0, 0.9), (1.0, 9, 0.9)]
)
def test_a_masked_token_is_never_drawn_and_the_last_one_left_always_is(
    settings: tuple[float, int, float],
) -> None:
    logits = torch.full((50, 100), float("-inf"))
    logits[:, 77] = -3.0
    assert sample(logits, *settings) == [77] * 50
    logits[:, 20] = -3.5
    assert set(sample(logits, *settings)) <= {20, 77}


@pytest.mark.parametrize(
    "settings", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 9, 1.0), (1.0, 0, 0.9), (1.0, 9, 0.9)]
)
def test_infinite_logits_still_give_a_token(settings: tuple[float, int, float]) -> None:
    rows = torch.full((2, 40), float("-inf"))
    rows[1, 33] = float("inf")
    assert sample(rows, *settings) == [0, 33]


@pytest.mark.parametrize("settings", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 9, 0.9)])
@pytest.mark.parametrize("where", [0, 15, 16, 40, 99])
def test_a_nan_gives_minus_one_and_leaves_the_other_rows_alone(
    settings: tuple[float, int, float], where: int
) -> None:
    logits = random_logits(3, 100, seed=0)
    clean = sample(logits, *settings)
    logits[1, where] = float("nan")
    assert sample(logits, *settings) == [clean[0], -1, clean[2]]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_row_draws_the_same_token_alone_in_any_batch_and_with_any_threads(
    threads: int, use_threads: Callable[[int], None]
) -> None:
    rows, vocab_size = 3 * len(SETTINGS), 10_000
    logits = random_logits(rows, vocab_size, seed=0)
    arguments = [
        logits,
        torch.tensor([s[0] for s in SETTINGS * 3], dtype=torch.float64),
        torch.tensor([s[1] for s in SETTINGS * 3], dtype=torch.int32),
        torch.tensor([s[2] for s in SETTINGS * 3], dtype=torch.float64),
        torch.tensor([0.0, 0.0, 0.05] * len(SETTINGS), dtype=torch.float64),
        torch.arange(rows) - 5,
        torch.arange(rows) * 7,
    ]
    use_threads(threads)
    together, alone = torch.full((rows,), -7), torch.full((rows,), -7)
    kernels.sample(*arguments, together)
    use_threads(1)
    for r in range(rows):
        kernels.sample(*(argument[r : r + 1] for argument in arguments), alone[r : r + 1])
    assert torch.equal(together, alone)


def test_seeds_are_the_bits_of_an_unsigned_number() -> None:
    logits = random_logits(4, 60, seed=0)
    assert sample(logits, seed=-1) == expected(logits, 1.0, 0, 1.0, seed=2**64 - 1)


def test_logits_may_be_rows_of_a_wider_tensor() -> None:
    wide = random_logits(5, 300, seed=0)
    assert sample(wide[:, 40:140]) == sample(wide[:, 40:140].contiguous())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, r"temperature: expected a finite number of at least 0, got -0\.1.* in row 0"),
        ({"temperature": float("nan")}, "temperature: expected a finite number"),
        ({"temperature": float("inf")}, "temperature: expected a finite number"),
        ({"top_k": -2}, r"top_k: expected -1 or 0 \(off\) or a positive number, got -2 in row 0"),
        ({"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0\.0"),
        ({"top_p": 1.1}, r"top_p: expected a number in \(0, 1\], got 1\.1"),
        ({"top_p": float("nan")}, r"top_p: expected a number in \(0, 1\]"),
        ({"min_p": -0.1}, r"min_p: expected a number in \[0, 1\], got -0\.1"),
        ({"min_p": 1.5}, r"min_p: expected a number in \[0, 1\], got 1\.5"),
        ({"min_p": float("nan")}, r"min_p: expected a number in \[0, 1\]"),
        ({"position": -1}, r"output_positions: expected values in \[0, 4294967296\).*got -1 at index 0"),
        ({"position": 2**32}, r"output_positions: .*got 4294967296 at index 0"),
    ],
)
def test_a_parameter_out_of_range_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(random_logits(2, 10, seed=0), **arguments)  # type: ignore[arg-type]


def test_an_empty_vocabulary_is_refused_and_no_rows_are_no_work() -> None:
    with pytest.raises(ValueError, match="logits: expected a vocabulary V between 1 and"):
        sample(torch.empty(2, 0))
    assert sample(torch.empty(0, 10)) == []


# apply_token_bitmask


def random_bitmasks(rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """int32 [rows, words]: words of no bit, of all bits, and random ones; bits behind V are set at random."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (rows, -(-vocab_size // 32)), dtype=np.uint64).astype(np.uint32)
    kinds = rng.integers(0, 4, words.shape)
    words[kinds == 0] = 0
    words[kinds == 1] = 2**32 - 1
    return torch.from_numpy(words.view(np.int32))


def masked_by_hand(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Bit by bit; logits [V], bitmask [words]."""
    expected = logits.clone()
    for token in range(len(logits)):
        if not int(bitmask[token // 32]) >> (token % 32) & 1:
            expected[token] = float("-inf")
    return expected


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 333])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_keeps_the_same_logit_if_its_bit_is_set_and_rows_without_a_mask_are_untouched(
    vocab_size: int, threads: int, use_threads: Callable[[int], None]
) -> None:
    use_threads(threads)
    logits = random_logits(24, vocab_size, seed=vocab_size)
    rows = [r for r in range(24) if r % 4 != 2]
    bitmasks = random_bitmasks(len(rows), vocab_size, seed=vocab_size)
    expected_rows = logits.clone()
    for r, bitmask in zip(rows, bitmasks, strict=True):
        expected_rows[r] = masked_by_hand(logits[r], bitmask)
    kernels.apply_token_bitmask(logits, torch.tensor(rows), bitmasks)
    assert torch.equal(logits, expected_rows)
    assert expected_rows.isinf().any()


def test_masked_rows_on_a_team_of_threads_equal_each_row_alone(use_threads: Callable[[int], None]) -> None:
    use_threads(4)
    logits = random_logits(12, 20_000, seed=1)  # enough work for a team
    bitmasks = random_bitmasks(12, 20_000, seed=2)
    alone = logits.clone()
    kernels.apply_token_bitmask(logits, torch.arange(12), bitmasks)
    for r in range(12):
        kernels.apply_token_bitmask(alone[r : r + 1], torch.tensor([0]), bitmasks[r : r + 1])
    assert torch.equal(logits, alone)


def test_a_row_with_nan_is_left_as_it_is_even_where_the_bitmask_would_hide_it() -> None:
    logits = random_logits(2, 40, seed=0)
    logits[0, 7] = float("nan")
    before = logits.clone()
    kernels.apply_token_bitmask(logits, torch.tensor([0]), torch.zeros(1, 2, dtype=torch.int32))
    np.testing.assert_array_equal(logits.numpy(), before.numpy())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([0, 3], r"rows: expected values in \[0, 3\) \(rows of logits\), got 3 at index 1"),
        ([-1, 1], r"rows: expected values in \[0, 3\) \(rows of logits\), got -1 at index 0"),
        ([1, 1], "rows: expected ascending rows, got 1 at index 1"),
    ],
)
def test_a_row_for_a_bitmask_out_of_range_is_refused_and_nothing_is_written(
    rows: list[int], message: str
) -> None:
    logits = torch.zeros(3, 9)
    with pytest.raises(ValueError, match=message):
        kernels.apply_token_bitmask(logits, torch.tensor(rows), torch.zeros(2, 1, dtype=torch.int32))
    assert logits.eq(0).all()


@pytest.mark.parametrize("num_words", [1, 3])
def test_a_bitmask_of_another_vocabulary_is_refused(num_words: int) -> None:
    bitmasks = torch.zeros(2, num_words, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"bitmasks: expected shape \[P=2, cdiv\(V, 32\)=2\], got"):
        kernels.apply_token_bitmask(torch.zeros(3, 33), torch.tensor([0, 1]), bitmasks)


# process_logits


def lists(parts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    starts = np.cumsum([0, *map(len, parts)])
    return torch.tensor(starts), torch.tensor([i for part in parts for i in part], dtype=torch.int32)


def process(logits: torch.Tensor, rules: dict[int, dict[str, Any]], on: Any = kernels) -> None:
    """Row -> arguments of `oracles.process_logits`."""
    order = sorted(rules)
    rows = [rules[r] for r in order]
    on.process_logits(
        logits,
        torch.tensor(order, dtype=torch.int64),
        *lists([sorted(row["allowed"]) for row in rows]),
        *lists([row["masked"] for row in rows]),
        *lists([list(row["biases"]) for row in rows]),
        torch.tensor([b for row in rows for b in row["biases"].values()], dtype=torch.float64),
        *lists([list(row["counts"]) for row in rows]),
        torch.tensor([c for row in rows for c in row["counts"].values()], dtype=torch.int32),
        *(
            torch.tensor([row[name] for row in rows], dtype=torch.float64)
            for name in ("repetition", "presence", "frequency")
        ),
    )


def random_rules(vocab_size: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        return rng.permutation(vocab_size)[: rng.integers(0, most + 1)].tolist()

    return {
        "allowed": ids(vocab_size) if seed % 2 else [],
        "masked": ids(4),
        "biases": {i: float(rng.normal(0, 30)) for i in ids(20)},
        "counts": {i: int(rng.integers(0, 5)) for i in ids(vocab_size)},
        "repetition": float(rng.choice([1.0, 1.3, 0.7, 1e-300, 1e300])),
        "presence": float(rng.uniform(-2, 2)),
        "frequency": float(rng.uniform(-2, 2)),
    }


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 333])
@pytest.mark.parametrize("threads", [1, 3])
def test_processed_logits_are_the_oracles_bits_and_other_rows_are_untouched(
    vocab_size: int, threads: int, use_threads: Callable[[int], None]
) -> None:
    use_threads(threads)
    logits = random_logits(24, vocab_size, seed=vocab_size)
    logits[3, 0], logits[4, 0] = float("-inf"), float("inf")
    rules = {r: random_rules(vocab_size, r) for r in range(24) if r % 4 != 2}
    expected_rows = logits.numpy().copy()
    for r, row in rules.items():
        expected_rows[r] = oracles.process_logits(logits[r].numpy(), **row)
    process(logits, rules)
    np.testing.assert_array_equal(logits.numpy(), expected_rows)


def test_many_rows_on_a_team_of_threads_equal_each_row_alone(use_threads: Callable[[int], None]) -> None:
    use_threads(4)
    logits = random_logits(12, 20_000, seed=1)  # enough work for a team
    rules = {r: random_rules(20_000, r) for r in range(12)}
    alone = logits.clone()
    process(logits, rules)
    for r in range(12):
        process(alone[r : r + 1], {0: rules[r]})
    assert torch.equal(logits, alone)


def test_a_row_with_nan_is_left_as_it_is_even_where_a_mask_would_hide_it() -> None:
    logits = random_logits(2, 40, seed=0)
    logits[0, 7] = float("nan")
    before = logits.clone()
    rules = {**random_rules(40, 0), "allowed": [1], "masked": [7]}
    process(logits, {0: rules})
    np.testing.assert_array_equal(logits.numpy(), before.numpy())


def call_process(**changes: torch.Tensor) -> torch.Tensor:
    arguments = {
        "logits": torch.zeros(3, 9),
        "rows": torch.tensor([0, 2]),
        "allowed_starts": torch.tensor([0, 2, 2]),
        "allowed_ids": torch.tensor([1, 8], dtype=torch.int32),
        "masked_starts": torch.tensor([0, 0, 1]),
        "masked_ids": torch.tensor([5], dtype=torch.int32),
        "biased_starts": torch.tensor([0, 0, 1]),
        "biased_ids": torch.tensor([7], dtype=torch.int32),
        "biases": torch.ones(1, dtype=torch.float64),
        "seen_starts": torch.tensor([0, 1, 1]),
        "seen_ids": torch.tensor([3], dtype=torch.int32),
        "counts": torch.tensor([2], dtype=torch.int32),
        "repetition_penalty": torch.ones(2, dtype=torch.float64),
        "presence_penalty": torch.zeros(2, dtype=torch.float64),
        "frequency_penalty": torch.zeros(2, dtype=torch.float64),
    } | changes
    kernels.process_logits(**arguments)
    return arguments["logits"]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("rows", [0, 3], r"rows: expected values in \[0, 3\) \(rows of logits\), got 3 at index 1"),
        ("rows", [1, 1], "rows: expected ascending rows, got 1 at index 1"),
        ("allowed_ids", [8, 8], "allowed_ids: expected ascending ids, got 8 in the list at index 0"),
        ("allowed_ids", [1, 9], r"allowed_ids: expected values in \[0, 9\) \(the vocabulary\), got 9"),
        ("masked_ids", [-1], r"masked_ids: expected values in \[0, 9\)"),
        ("biased_ids", [9], r"biased_ids: expected values in \[0, 9\)"),
        ("seen_ids", [9], r"seen_ids: expected values in \[0, 9\)"),
        ("allowed_starts", [0, 3, 2], "allowed_starts: expected ascending offsets from 0 to 2"),
        ("masked_starts", [0, 0, 2], "masked_starts: expected ascending offsets from 0 to 1"),
        ("biased_starts", [1, 1, 1], "biased_starts: expected ascending offsets from 0 to 1"),
        ("seen_starts", [0, 1, 0], "seen_starts: expected ascending offsets from 0 to 1"),
        ("repetition_penalty", [1.0, 0.0], "repetition_penalty: expected a finite number above 0, got 0"),
        ("repetition_penalty", [float("nan"), 1.0], "repetition_penalty: expected a finite number above 0"),
    ],
)
def test_a_list_or_penalty_out_of_range_is_refused_and_nothing_is_written(
    name: str, values: list[Any], message: str
) -> None:
    dtype = {"rows": torch.int64, "repetition_penalty": torch.float64}.get(name, torch.int32)
    logits = torch.zeros(3, 9)
    with pytest.raises(ValueError, match=message):
        call_process(
            logits=logits,
            **{name: torch.tensor(values, dtype=torch.int64 if name.endswith("starts") else dtype)},
        )
    assert torch.equal(logits, torch.zeros(3, 9))


def test_a_valid_call_masks_what_is_not_allowed() -> None:
    assert call_process().isinf().sum(dim=1).tolist() == [7, 0, 1]
