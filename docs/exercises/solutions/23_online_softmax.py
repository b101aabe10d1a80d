"""Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); the inside of FlashAttention."""

import numpy as np


def attend(scores: np.ndarray, values: np.ndarray, tile: int) -> np.ndarray:
    largest, total = -np.inf, 0.0
    output = np.zeros(values.shape[1])
    for start in range(0, len(scores), tile):
        part = scores[start : start + tile]
        new_largest = max(largest, float(part.max()))
        scale = np.exp(largest - new_largest)
        weights = np.exp(part - new_largest)
        total = total * scale + weights.sum()
        output = output * scale + weights @ values[start : start + tile]
        largest = new_largest
    return output / total
