from itertools import pairwise

import numpy as np


def part_of(scores, values):
    if not len(scores):
        return -np.inf, 0.0, np.zeros(values.shape[1])
    weights = np.exp(scores - scores.max())
    return float(scores.max()), float(weights.sum()), weights @ values


def whole(scores, values):
    _, total, output = part_of(scores, values)
    return output / total


def check_one_part_is_divided_by_its_sum(exercise):
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=9), rng.normal(size=(9, 4))
    got = exercise.merge([part_of(scores, values)])
    assert np.allclose(got, whole(scores, values)), f"got {got}"


def check_any_split_gives_the_same(exercise):
    rng = np.random.default_rng(1)
    scores, values = rng.normal(size=64) * 5, rng.normal(size=(64, 4))
    for cuts in ([32], [10, 11, 50], [1, 2, 3]):
        bounds = [0, *cuts, 64]
        parts = [part_of(scores[a:b], values[a:b]) for a, b in pairwise(bounds)]
        error = np.abs(exercise.merge(parts) - whole(scores, values)).max()
        assert error < 1e-12, f"Cut at {cuts} the result is off by {error}."


def check_empty_parts_do_no_harm(exercise):
    rng = np.random.default_rng(2)
    scores, values = rng.normal(size=8), rng.normal(size=(8, 4))
    empty = part_of(scores[:0], values[:0])
    got = exercise.merge([empty, part_of(scores, values), empty])
    assert np.isfinite(got).all(), f"got {got}: exp(-inf - (-inf)) is not a number"
    assert np.allclose(got, whole(scores, values))
