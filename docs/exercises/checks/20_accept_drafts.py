import random

from reference.frontend.learn import expect


def check_all_right_gives_one_more(exercise):
    expect("accepted([5, 6], [5, 6, 7])", exercise.accepted([5, 6], [5, 6, 7]), [5, 6, 7])


def check_the_first_wrong_one_ends_the_run(exercise):
    expect("accepted([5, 6], [5, 9, 7])", exercise.accepted([5, 6], [5, 9, 7]), [5, 9])
    expect("accepted([5, 6], [4, 6, 7])", exercise.accepted([5, 6], [4, 6, 7]), [4])


def check_no_drafts_is_an_ordinary_decode(exercise):
    expect("accepted([], [7])", exercise.accepted([], [7]), [7])


def check_the_output_is_that_of_the_model_alone(exercise):
    for seed in range(50):
        rng = random.Random(seed)
        text = [rng.randrange(3) for _ in range(40)]  # what the model says
        output = []
        while len(output) < 30:
            drafts = [rng.randrange(3) for _ in range(rng.randint(0, 4))]
            at = len(output)
            output += exercise.accepted(drafts, text[at : at + len(drafts) + 1])
        expect(f"the output of run {seed}", output, text[: len(output)])


def check_what_was_computed_for_wrong_drafts_is_rolled_back(exercise):
    for drafts, drawn, wasted in (([5, 6], [5, 9, 7], 1), ([5, 6], [4, 6, 7], 2), ([5, 6], [5, 6, 7], 0)):
        expect(f"wasted_slots({drafts}, {drawn})", exercise.wasted_slots(drafts, drawn), wasted)
