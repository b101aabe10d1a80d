import numpy as np
from gguf import GGMLQuantizationType, dequantize, quantize

from reference.frontend.learn import expect


def check_a_block_by_hand(exercise):
    halves = np.array([0.5, -1.0], np.float16).view(np.uint8)
    nibbles = np.arange(16, dtype=np.uint8) | (15 << 4)
    got = exercise.unpack(np.concatenate([halves, nibbles]))
    expect("the first three weights", got[:3].tolist(), [-1.0, -0.5, 0.0])
    expect("weights 16 to 18", got[16:19].tolist(), [6.5, 6.5, 6.5])


def check_it_agrees_with_the_library(exercise):
    weights = np.random.default_rng(0).normal(size=32 * 9).astype(np.float32)
    packed = quantize(weights, GGMLQuantizationType.Q4_1).reshape(-1)
    wanted = dequantize(packed, GGMLQuantizationType.Q4_1).reshape(-1)
    got = exercise.unpack(packed)
    assert got.dtype == np.float32, f"the weights are {got.dtype}, not float32"
    assert np.array_equal(got, wanted), "The weights are not those of the gguf library, bit for bit."
