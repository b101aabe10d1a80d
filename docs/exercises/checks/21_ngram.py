import random

from reference.frontend.learn import expect


def check_what_followed_before_is_the_guess(exercise):
    expect("propose([1, 2, 3, 4, 1, 2], 1, 3, 2)", exercise.propose([1, 2, 3, 4, 1, 2], 1, 3, 2), [3, 4])


def check_the_longest_tail_goes_first(exercise):
    got = exercise.propose([9, 2, 5, 5, 1, 2, 7, 7, 1, 2], 1, 3, 2)
    expect("propose([9, 2, 5, 5, 1, 2, 7, 7, 1, 2], 1, 3, 2)", got, [7, 7])


def check_the_earliest_occurrence_counts(exercise):
    expect("propose([1, 5, 1, 6, 1], 1, 2, 1)", exercise.propose([1, 5, 1, 6, 1], 1, 2, 1), [5])


def check_nothing_found_is_no_guess(exercise):
    expect("propose([1, 2, 3], 1, 2, 4)", exercise.propose([1, 2, 3], 1, 2, 4), [])


def check_random_sequences_agree_with_the_engine(exercise):
    import numpy as np

    from reference.contracts.config import SpeculativeConfig
    from reference.contracts.sampling_params import SamplingParams
    from reference.contracts.speculation import DraftRequest
    from reference.speculator import NgramProposer

    proposer = NgramProposer(SpeculativeConfig("ngram", 4, prompt_lookup_min=1, prompt_lookup_max=3))
    for seed in range(50):
        rng = random.Random(seed)
        tokens = [rng.randrange(4) for _ in range(rng.randint(2, 20))]
        request = DraftRequest("r", np.array(tokens, np.int32), 1, SamplingParams(), 0, 4)
        wanted = [int(token) for token in proposer.propose([request]).get("r", [])]
        expect(f"propose({tokens}, 1, 3, 4)", exercise.propose(tokens, 1, 3, 4), wanted)
