"""philox, penalties and topk_topp_sample, rung by rung, under the emulator: words, logits and tokens of the oracles."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fast import kernels
from reference.contracts.noise import gumbel_noise
from tests.kernels import oracles
from tests.kernels.ladders import Rung, every_rung, padded
from tests.kernels.test_sampler import SETTINGS, expected, process, random_logits, random_rules, sample

SEEDS = [0, 1, 2**32, 2**63 + 5, 2**64 - 1]


def on(rung: Rung) -> SimpleNamespace:
    """What stands in for `fast.kernels` in the helpers of the CPU's tests."""
    return SimpleNamespace(
        sample=partial(rung.ladder.sample, rung=rung.name),
        process_logits=partial(rung.ladder.process_logits, rung=rung.name),
    )


def as_signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


@every_rung("philox")
@pytest.mark.parametrize("vocab_size", [1, 6, 515])
def test_every_word_is_that_of_the_contract(rung: Rung, vocab_size: int) -> None:
    positions = [0, 1, 4000, 2**32 - 1, 7]
    out = torch.full((5, vocab_size + -vocab_size % 4 + 4), -7, dtype=torch.int32)[:, :vocab_size]
    rung.ladder.philox(
        out, torch.tensor([as_signed(seed) for seed in SEEDS]), torch.tensor(positions), rung.name
    )
    for row, seed, position in zip(out.numpy(), SEEDS, positions, strict=True):
        key = (seed & 0xFFFFFFFF, seed >> 32)
        blocks = [oracles.philox4x32_10((i, position, 0, 0), key) for i in range(-(-vocab_size // 4))]
        words = np.array(blocks, dtype=np.uint32).reshape(-1)[:vocab_size]
        np.testing.assert_array_equal(row.view(np.uint32), words)
        noise = -np.log(-np.log((row.view(np.uint32).astype(np.float64) + 0.5) * 2.0**-32))
        np.testing.assert_array_equal(noise, gumbel_noise(seed, position, vocab_size))


def test_a_row_that_no_vector_fits_takes_the_lower_rung() -> None:
    out = torch.zeros(2, 5, dtype=torch.int32)
    ladder = kernels.ladder("simt")
    ladder.philox(out, torch.tensor([3, 3]), torch.tensor([1, 1]))
    assert torch.equal(out[0], out[1])
    with pytest.raises(ValueError, match="rung: expected rows of a multiple of 16 bytes"):
        ladder.philox(out, torch.tensor([3, 3]), torch.tensor([1, 1]), "v2_block")
    with pytest.raises(ValueError, match="output_positions: expected values in"):
        ladder.philox(out, torch.tensor([3, 3]), torch.tensor([1, 2**32]))


@every_rung("topk_topp_sample")
@pytest.mark.parametrize("vocab_size", [1, 7, 300])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 1.0])
def test_tokens_equal_the_oracle(rung: Rung, vocab_size: int, min_p: float) -> None:
    logits = random_logits(3, vocab_size, seed=vocab_size)
    for temperature, top_k, top_p in SETTINGS:
        drawn = sample(logits, temperature, top_k, top_p, seed=3, min_p=min_p, on=on(rung))
        assert drawn == expected(logits, temperature, top_k, top_p, seed=3, min_p=min_p)


@every_rung("topk_topp_sample")
def test_of_equal_logits_those_of_the_lowest_ids_are_kept(rung: Rung) -> None:
    logits = random_logits(4, 120, seed=0).round()  # zeros of both signs among them
    for temperature, top_k, top_p in SETTINGS:
        drawn = sample(logits, temperature, top_k, top_p, seed=1, on=on(rung))
        assert drawn == expected(logits, temperature, top_k, top_p, seed=1)


@pytest.mark.parametrize("name", kernels.ladder("simt").rungs["topk_topp_sample"])
def test_a_kept_set_is_exactly_the_oracles(name: str) -> None:
    """With equal logits only the noise decides, so enough draws visit every kept token, and no other."""
    rung = Rung("topk_topp_sample", name, kernels.ladder("simt", threads=2))
    logits = torch.zeros(24, 12)
    logits[:, 2:] = -0.01
    for top_k, top_p, min_p in [(3, 1.0, 0), (0, 0.25, 0), (11, 0.3, 0), (0, 0.75, 0.995)]:
        kept = oracles.kept_tokens(logits[0].double().numpy(), 1.0, top_k, top_p, min_p)
        assert set(sample(logits, 1.0, top_k, top_p, min_p=min_p, on=on(rung))) == set(kept.tolist())
    quarters = torch.zeros(16, 4)  # exact in binary: two tokens reach a half
    assert set(sample(quarters, top_p=0.5, on=on(rung))) == {0, 1}
    assert set(sample(quarters, top_p=0.5 + 1e-9, on=on(rung))) == {0, 1, 2}


@every_rung("topk_topp_sample")
def test_a_nan_gives_minus_one_and_infinities_still_give_a_token(rung: Rung) -> None:
    rows = torch.full((4, 300), float("-inf"))
    rows[1, 33], rows[2, 270], rows[3, 299] = float("inf"), -3.0, float("nan")
    for settings in [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 9, 1.0), (1.0, 0, 0.9), (1.0, 9, 0.9)]:
        assert sample(rows, *settings, on=on(rung)) == [0, 33, 270, -1]


@every_rung("topk_topp_sample")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_sampled_as_the_numbers_they_are(rung: Rung, dtype: torch.dtype) -> None:
    logits = padded(random_logits(3, 100, seed=5).to(dtype), 8)
    drawn = sample(logits, 0.8, 30, 0.9, seed=2, on=on(rung))
    assert drawn == expected(logits.float(), 0.8, 30, 0.9, seed=2)


def test_a_large_vocabulary_gives_the_token_of_the_cpu() -> None:
    logits = random_logits(1, 49_152, seed=0)
    for top_k, top_p in [(0, 1.0), (50, 1.0), (0, 0.95), (200, 0.9)]:
        on_cpu = sample(logits, 0.9, top_k, top_p, seed=4)
        assert sample(logits, 0.9, top_k, top_p, seed=4, on=kernels.ladder("simt")) == on_cpu


@every_rung("penalties")
@pytest.mark.parametrize("vocab_size", [1, 64, 333])
def test_processed_logits_are_the_oracles_bits_and_other_rows_are_untouched(
    rung: Rung, vocab_size: int
) -> None:
    logits = padded(random_logits(8, vocab_size, seed=vocab_size), 4)
    logits[3, 0], logits[4, 0], logits[5, vocab_size - 1] = float("-inf"), float("inf"), float("nan")
    rules = {r: random_rules(vocab_size, r) for r in range(8) if r % 4 != 2}
    expected_rows = logits.numpy().copy()
    for r, row in rules.items():
        if r != 5:  # a NaN is left for sampling to refuse
            expected_rows[r] = oracles.process_logits(logits[r].numpy(), **row)
    process(logits, rules, on=on(rung))
    np.testing.assert_array_equal(logits.numpy(), expected_rows)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top_p", 0.0, r"top_p: expected a number in \(0, 1\], got 0.000000 in row 0"),
        ("top_k", -2, "top_k: expected -1 or 0"),
        ("temperature", float("nan"), "temperature: expected a finite number"),
        ("min_p", 1.5, r"min_p: expected a number in \[0, 1\]"),
    ],
)
def test_a_parameter_out_of_range_is_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(torch.zeros(1, 4), **{name: value}, on=kernels.ladder("simt"))


def test_a_list_of_ids_past_the_vocabulary_is_refused_and_nothing_is_written() -> None:
    logits = torch.zeros(1, 4)
    rules = {**random_rules(4, 0), "masked": [4]}
    with pytest.raises(
        ValueError, match=r"masked_ids: expected values in \[0, 4\) \(the vocabulary\), got 4"
    ):
        process(logits, {0: rules}, on=kernels.ladder("simt"))
    assert not logits.any()
