"""Random draws as a pure function of (request seed, output position, token id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) is a counter-based generator: it has
no state to advance, so batch composition, chunking, preemption and tier can never change a draw. Adding Gumbel noise
to the scaled logits and taking the argmax samples from their softmax (the Gumbel-max trick).
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox.

    Args:
        counter: uint32 [M, 4].
        key: two 32-bit numbers.

    Returns:
        uint32 [M, 4].
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))  # each [M]
    k0, k1 = key
    for _ in range(10):
        p0 = c0 * _MULTIPLIERS[0]  # 32 x 32 bits fit into 64
        p1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def gumbel_noise(seed: int, output_position: int, vocab_size: int) -> np.ndarray:
    """Gumbel noise for every token of the vocabulary: float64 [V].

    Token t takes word t % 4 of the counter (t // 4, output_position, 0, 0); u = (word + 0.5) / 2**32 is never 0 or 1.
    """
    counter = np.zeros(((vocab_size + 3) // 4, 4), dtype=np.uint32)  # [ceil(V/4), 4]
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1] = output_position
    seed &= 2**64 - 1
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:vocab_size]  # [V]
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log(u)))


def derive_seed(engine_seed: int, arrival_number: int) -> int:
    """Seed of a request that brought none: reproducible for the n-th request of an engine with this seed."""
    digest = hashlib.sha256(struct.pack("<QQ", engine_seed & (2**64 - 1), arrival_number)).digest()
    return int.from_bytes(digest[:8], "little")
