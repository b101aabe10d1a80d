import numpy as np

from reference.contracts.noise import gumbel_noise
from reference.frontend.learn import expect


def check_temperature_zero_is_the_argmax_and_the_lowest_id_of_equals(exercise):
    logits = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    expect("draw([1, 3, 3, 2], 0, noise)", exercise.draw(logits, 0.0, gumbel_noise(0, 0, 4)), 1)


def check_the_noise_decides_between_close_ones(exercise):
    logits = np.array([0.0, 0.1], np.float32)
    expect("draw([0, 0.1], 1, [0.5, 0])", exercise.draw(logits, 1.0, np.array([0.5, 0.0])), 0)


def check_draws_follow_the_softmax(exercise):
    logits, temperature = np.array([0.0, 1.0, 2.0], np.float32), 0.7
    draws = [exercise.draw(logits, temperature, gumbel_noise(seed, 5, 3)) for seed in range(4000)]
    shares = np.bincount(draws, minlength=3) / len(draws)
    weights = np.exp(logits / temperature)
    error = np.abs(shares - weights / weights.sum()).max()
    # 4 standard deviations of a share of 4,000 draws are at most 4 * 0.5 / sqrt(4000) = 0.032
    assert error < 0.032, f"Of 4,000 draws the shares are {shares}, softmax says {weights / weights.sum()}."


def check_it_draws_what_the_engine_draws(exercise):
    from reference.sampler import Sampler, SamplingMetadata

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 50)).astype(np.float32)
    ones = np.ones(8)
    metadata = SamplingMetadata(
        temperature=0.5 * ones,
        top_k=0 * ones.astype(np.int32),
        top_p=ones,
        min_p=0 * ones,
        seeds=np.arange(8, dtype=np.uint64),
        output_positions=np.arange(8),
        processed_rows={},
        bitmasks={},
    )
    wanted = Sampler()(logits, metadata)
    got = [exercise.draw(row, 0.5, gumbel_noise(r, r, 50)) for r, row in enumerate(logits)]
    expect("the tokens of eight rows", got, wanted)
