import numpy as np


class Tiles(np.ndarray):
    """Scores that may only be read a tile at a time."""

    def __getitem__(self, index):
        part = np.asarray(super().__getitem__(index))
        assert part.size <= 4, f"{part.size} scores were read at once; a tile holds 4."
        return part


def softmax_attention(scores, values):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ values


def check_one_tile_is_an_ordinary_softmax(exercise):
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=8), rng.normal(size=(8, 3))
    got = exercise.attend(scores, values, 8)
    assert np.allclose(got, softmax_attention(scores, values)), f"got {got}"


def check_tiles_do_not_change_the_result(exercise):
    rng = np.random.default_rng(1)
    scores, values = rng.normal(size=37) * 4, rng.normal(size=(37, 5))
    for tile in (1, 4, 16, 37, 50):
        got = exercise.attend(scores, values, tile)
        error = np.abs(got - softmax_attention(scores, values)).max()
        assert error < 1e-12, f"With tiles of {tile} the result is off by {error}."


def check_large_scores_do_not_overflow(exercise):
    got = exercise.attend(np.array([1000.0, 1001.0, -1000.0]), np.eye(3), 1)
    assert np.isfinite(got).all(), f"got {got}: subtract the largest score before exp."
    assert np.allclose(got, softmax_attention(np.array([1000.0, 1001.0, -1000.0]), np.eye(3)))


def check_no_more_than_a_tile_is_read_at_once(exercise):
    scores = np.linspace(-1, 1, 16).view(Tiles)
    exercise.attend(scores, np.ones((16, 2)), 4)
