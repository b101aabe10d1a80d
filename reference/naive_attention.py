"""Paged attention as plain loops, token by token through the block table: what a kernel does, written to be read.

It is the oracle of `attention.py` and of the kernels, so it works in float64: its own rounding is far below that of
whatever is compared with it.
"""

from __future__ import annotations

import math

import numpy as np

from reference.attention import AttentionMetadata


def naive_paged_attention(
    query: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> np.ndarray:
    """Same arguments and result as `attention.paged_attention`, but returned in float64: [T, H, D]."""
    num_heads, num_kv_heads = query.shape[1], k_cache.shape[2]
    heads_per_kv_head = num_heads // num_kv_heads
    output = np.zeros(query.shape, dtype=np.float64)  # [T, H, D]

    for s, seq_len in enumerate(metadata.seq_lens.tolist()):
        start, end = metadata.query_start_loc[s : s + 2].tolist()
        first_position = seq_len - (end - start)
        for row in range(start, end):
            position = first_position + (row - start)
            first_seen = 0 if sliding_window is None else max(position - sliding_window + 1, 0)
            for h in range(num_heads):
                kv_head = h // heads_per_kv_head
                output[row, h] = _attend(
                    query[row, h].astype(np.float64),  # [D]
                    k_cache[:, :, kv_head],  # [N, B, D]
                    v_cache[:, :, kv_head],  # [N, B, D]
                    metadata.block_tables[s],
                    range(first_seen, position + 1),  # causal: a token sees itself, and what is before it
                    scale,
                )
    return output


def _attend(
    query: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_table: np.ndarray,
    context: range,
    scale: float,
) -> np.ndarray:
    """One query token, one head: softmax(q . k_j * scale) over the positions j of its context, times v_j. [D] -> [D].

    Two passes over the context. The first finds the largest score, because exp of a raw score may overflow; the second
    weighs the values relative to it. The division by the sum of the weights can wait until the end.
    """
    block_size = k_cache.shape[1]

    scores = []
    largest = -math.inf
    for j in context:
        block, offset = block_table[j // block_size], j % block_size
        score = float(query @ k_cache[block, offset]) * scale
        scores.append(score)
        largest = max(largest, score)

    total = 0.0
    weighted_values = np.zeros(len(query), dtype=np.float64)  # [D]
    for j, score in zip(context, scores, strict=True):
        block, offset = block_table[j // block_size], j % block_size
        weight = math.exp(score - largest)
        total += weight
        weighted_values += weight * v_cache[block, offset].astype(np.float64)
    return weighted_values / total
