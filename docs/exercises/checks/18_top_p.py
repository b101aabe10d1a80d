import numpy as np

from reference.frontend.learn import expect

PROBABILITIES = np.array([0.1, 0.5, 0.15, 0.25])


def check_the_token_that_reaches_p_is_kept(exercise):
    expect("nucleus([0.1, 0.5, 0.15, 0.25], 0.6)", exercise.nucleus(PROBABILITIES, 0.6), [1, 3])
    expect("nucleus([0.1, 0.5, 0.15, 0.25], 0.75)", exercise.nucleus(PROBABILITIES, 0.75), [1, 3])


def check_at_least_one_is_kept(exercise):
    expect("nucleus([0.1, 0.5, 0.15, 0.25], 1e-9)", exercise.nucleus(PROBABILITIES, 1e-9), [1])


def check_one_keeps_all(exercise):
    expect("nucleus([0.1, 0.5, 0.15, 0.25], 1.0)", exercise.nucleus(PROBABILITIES, 1.0), [1, 3, 2, 0])


def check_of_equals_the_lower_id_comes_first(exercise):
    expect("nucleus([0.25] * 4, 0.5)", exercise.nucleus(np.full(4, 0.25), 0.5), [0, 1])


def check_random_rows_agree_with_the_sampler(exercise):
    from reference.sampler import _nucleus_size

    for seed in range(30):
        z = np.sort(np.random.default_rng(seed).normal(size=50))[::-1]  # best first, as the sampler has them
        weights = np.exp(z - z.max())
        got = exercise.nucleus(weights / weights.sum(), 0.8)
        expect(f"len(nucleus(row {seed}, 0.8))", len(got), _nucleus_size(z, 0.8))
