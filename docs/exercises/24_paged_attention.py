"""Paged attention, by hand.

One query token of one head attends to the `seq_len` tokens of its sequence, whose keys and values lie in the blocks of
its table. Return softmax(scale * query . keys) @ values. (The article's version forgets the softmax over the whole
context.)
"""

import numpy as np

HINTS = (
    "k_cache[block_table] are the blocks in logical order: [blocks, B, D]. Flatten the first two, cut at seq_len.",
    "The last block holds whatever somebody else left behind the last token: cut it off before the softmax.",
)


def paged_attention(
    query: np.ndarray,  # [D]
    k_cache: np.ndarray,  # [N, B, D]
    v_cache: np.ndarray,  # [N, B, D]
    block_table: list[int],
    seq_len: int,
    scale: float,
) -> np.ndarray:
    raise NotImplementedError
