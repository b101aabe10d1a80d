"""Gather through the table, then ordinary attention; kernels do the first without copying."""

import numpy as np


def paged_attention(
    query: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_table: list[int],
    seq_len: int,
    scale: float,
) -> np.ndarray:
    head_dim = len(query)
    keys = k_cache[block_table].reshape(-1, head_dim)[:seq_len]  # [L, D]
    values = v_cache[block_table].reshape(-1, head_dim)[:seq_len]  # [L, D]
    scores = scale * (keys @ query)  # [L]
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ values
