import numpy as np

from reference.contracts.logits import unpack_bitmask
from reference.frontend.learn import expect


def check_only_set_bits_are_kept(exercise):
    got = exercise.apply_mask(np.arange(4, dtype=np.float32), np.array([0b0101], np.int32))
    expect("apply_mask([0, 1, 2, 3], 0b0101)", got.tolist(), [0, -np.inf, 2, -np.inf])


def check_the_highest_bit_of_a_word(exercise):
    got = exercise.apply_mask(np.zeros(33, np.float32), np.array([-(2**31), 1], np.int32))
    kept = np.flatnonzero(np.isfinite(got)).tolist()
    expect("tokens kept by the words -2**31 and 1", kept, [31, 32])


def check_random_masks_agree_with_the_engine(exercise):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=100).astype(np.float32)
        mask = rng.integers(-(2**31), 2**31, 4).astype(np.int32)
        wanted = np.where(unpack_bitmask(mask, 100), logits, -np.inf)
        assert np.array_equal(exercise.apply_mask(logits, mask), wanted), f"Mask {seed} is applied wrongly."
