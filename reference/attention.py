"""Paged attention: a request's K and V live in blocks scattered over the cache, found through its block table.

    token position p of a request  ->  logical block p // B, offset p % B
    logical block i                ->  physical block block_table[i]
    slot                           =   physical block * B + offset

`write_kv_cache` scatters by slot, `paged_attention` gathers by block table. `naive_attention.py` is the same function
as plain loops: read it first. Fast twin: `fast/attention.py`.
Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.contracts.config import cdiv


@dataclass(frozen=True)
class AttentionMetadata:
    """Which rows of the flat batch belong to which sequence, and where each sequence's K and V live.

    Rows [query_start_loc[s], query_start_loc[s + 1]) are the *last* tokens of sequence s: with q of them, they stand at
    positions [seq_lens[s] - q, seq_lens[s]). Entries of a block table beyond cdiv(seq_lens[s], B) are padding, never
    read; nor are those wholly left of the window of the first row.
    """

    query_start_loc: np.ndarray  # int32 [S + 1], starts with 0, ends with T
    seq_lens: np.ndarray  # int32 [S], tokens in the cache once this batch is written
    block_tables: np.ndarray  # int32 [S, max_blocks], padded with 0
    slot_mapping: np.ndarray  # int64 [T]


def write_kv_cache(
    key: np.ndarray,
    value: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    metadata: AttentionMetadata,
) -> None:
    """Store the batch's keys and values [T, Hkv, D] at their slots of the caches [N, B, Hkv, D]."""
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    by_slot = (num_blocks * block_size, num_kv_heads, head_dim)  # slot = block * B + offset
    k_cache.reshape(by_slot)[metadata.slot_mapping] = key  # reshape is a view: this writes into the cache
    v_cache.reshape(by_slot)[metadata.slot_mapping] = value


def paged_attention(
    query: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> np.ndarray:
    """Causal attention of every query token over the cached tokens of its own sequence.

    Args:
        query: [T, H, D].
        k_cache: [N, B, Hkv, D]; H is a multiple of Hkv, and query head h reads KV head h // (H / Hkv).
        v_cache: [N, B, Hkv, D].
        metadata: see `AttentionMetadata`; the batch's own K and V are already written.
        scale: multiplies the scores, usually D ** -0.5.
        sliding_window: W; a token sees itself and the W - 1 tokens before it. None: all before it.

    Returns:
        [T, H, D].
    """
    output = np.empty_like(query)  # [T, H, D]
    starts = metadata.query_start_loc
    for s, seq_len in enumerate(metadata.seq_lens):
        rows = slice(starts[s], starts[s + 1])
        first = 0  # the leftmost position that the first of these rows sees, and so any of them
        if sliding_window is not None:
            first = max(seq_len - (rows.stop - rows.start) - sliding_window + 1, 0)
        keys = _gather(k_cache, metadata.block_tables[s], first, seq_len)  # [L, Hkv, D], L = seq_len - first
        values = _gather(v_cache, metadata.block_tables[s], first, seq_len)  # [L, Hkv, D]
        output[rows] = _causal_attention(query[rows], keys, values, scale, sliding_window)
    return output


def _gather(cache: np.ndarray, block_table: np.ndarray, first: int, end: int) -> np.ndarray:
    """Positions [first, end) of a sequence, in order: [L, Hkv, D] with L = end - first."""
    _, block_size, num_kv_heads, head_dim = cache.shape
    first_block = first // block_size  # blocks left of it may be given away already
    blocks: np.ndarray = cache[block_table[first_block : cdiv(end, block_size)]]  # [about L/B, B, Hkv, D]
    tokens = blocks.reshape(-1, num_kv_heads, head_dim)  # [about L, Hkv, D]
    start = first_block * block_size
    return tokens[first - start : end - start]  # the first and the last block may be needed in part only


def _causal_attention(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, sliding_window: int | None
) -> np.ndarray:
    """Attention of one sequence's last Tq tokens over its last L tokens, L >= Tq: [Tq, H, D] -> [Tq, H, D].

    Query heads of one group share a KV head. Splitting H into [Hkv, H/Hkv] lets broadcasting express that: nothing is
    repeated in memory.
    """
    num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads  # G
    query = query.reshape(num_queries, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)  # [Hkv, G, Tq, D]
    keys = keys.transpose(1, 2, 0)[:, None]  # [Hkv, 1, D, L]
    values = values.transpose(1, 0, 2)[:, None]  # [Hkv, 1, L, D]

    scores = query @ keys * np.float32(scale)  # [Hkv, G, Tq, L]
    # A key's distance to each query, counted backwards: 0 is the query's own token, below 0 is the future.
    distances = np.arange(num_keys - num_queries, num_keys)[:, None] - np.arange(num_keys)  # [Tq, L]
    visible = distances >= 0  # [Tq, L]
    if sliding_window is not None:
        visible &= distances < sliding_window
    scores = np.where(visible, scores, np.float32(-np.inf))

    # The largest score becomes 0, so exp never overflows; every row sees at least its own key, so no row is empty.
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))  # [Hkv, G, Tq, L]
    weights /= weights.sum(axis=-1, keepdims=True)
    output: np.ndarray = weights @ values  # [Hkv, G, Tq, D]
    return output.transpose(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
