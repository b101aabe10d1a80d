"""Five bits a weight instead of 32: read less, and one request decodes that much quicker."""

import numpy as np


def unpack(data: np.ndarray) -> np.ndarray:
    blocks = data.reshape(-1, 20)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)  # [blocks, 1]
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)  # [blocks, 1]
    quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)  # [blocks, 32]
    return (quants.astype(np.float32) * scale + minimum).reshape(-1)
