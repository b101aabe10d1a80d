import numpy as np

from reference.contracts.logits import process_logits
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.learn import expect

LOGITS = np.array([2.0, -2.0, 1.0, 0.5, -1.0], np.float32)


def check_repetition_makes_negative_logits_more_negative(exercise):
    got = exercise.penalize(LOGITS, [0], [1], 2.0, 0.0, 0.0)
    expect("penalize([2, -2, ...], prompt [0], output [1], repetition 2)", got.tolist(), [1, -4, 1, 0.5, -1])


def check_frequency_counts_and_presence_does_not(exercise):
    got = exercise.penalize(LOGITS, [3], [2, 2, 4], 1.0, 0.25, 0.5)
    expect("penalize(output [2, 2, 4], frequency 0.25, presence 0.5)", got.tolist(), [2, -2, 0, 0.5, -1.75])


def check_the_given_logits_stay_as_they_are(exercise):
    logits = LOGITS.copy()
    exercise.penalize(logits, [0], [1], 2.0, 0.5, 0.5)
    expect("the logits afterwards", logits.tolist(), LOGITS.tolist())


def check_random_requests_agree_with_the_engine(exercise):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=30).astype(np.float32)
        prompt, output = rng.integers(0, 30, 12).tolist(), rng.integers(0, 30, 9).tolist()
        params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2)
        wanted = process_logits(logits, params, prompt, output)
        got = exercise.penalize(logits, prompt, output, 1.3, 0.4, -0.2)
        # The engine computes in float64 and rounds once; three roundings of numbers below 8 differ by 1.5e-6 at most.
        error = np.abs(got - wanted).max()
        assert error < 2e-6, f"Request {seed}: a logit is off by {error}."
