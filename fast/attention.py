"""Paged attention by kernel. Twin: `reference/attention.py`; for the idea itself, read that first.

What differs:

- One call for the whole ragged batch, prefill chunks and decodes mixed: sequences are spread over the cores, where
  the twin loops over them in Python; of few sequences, so are KV heads and parts of 256 tokens of a context.
- The query heads of a KV head go through a tile of its keys and values together, and so do a prefill chunk's rows.
- K and V are read where they lie in the cache, block by block, with a running softmax: neither the gathered
  context nor the score matrix of the twin ever exists in memory.
- Queries, keys and values may be slices of one fused projection: nothing is copied on the way into the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fast import kernels


@dataclass(frozen=True)
class AttentionMetadata:
    """Which rows of the flat batch belong to which sequence, and where each sequence's K and V live.

    Rows [query_start_loc[s], query_start_loc[s + 1]) are the *last* tokens of sequence s: with q of them,
    they stand at positions [seq_lens[s] - q, seq_lens[s]). Entries of a block table beyond
    cdiv(seq_lens[s], B), or wholly left of the window of the first row, are never read.
    """

    query_start_loc: torch.Tensor  # int32 [S + 1], starts with 0, ends with T
    seq_lens: torch.Tensor  # int32 [S], tokens in the cache once this batch is written
    block_tables: torch.Tensor  # int32 [S, max_blocks], padded with 0; may be a view of a wider table
    slot_mapping: torch.Tensor  # int64 [T]


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
) -> None:
    """Store the batch's keys and values [T, Hkv, D] at their slots of the caches [N, B, Hkv, D].

    Raises:
        ValueError: a slot lies outside the cache; then nothing is written.
    """
    kernels.reshape_and_cache(key, value, k_cache, v_cache, metadata.slot_mapping)


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention of every query token over the cached tokens of its own sequence.

    Args:
        query: [T, H, D]; only its outermost stride may differ from a contiguous tensor's.
        k_cache: [N, B, Hkv, D]; H is a multiple of Hkv, and query head h reads KV head h // (H / Hkv).
        v_cache: [N, B, Hkv, D].
        metadata: see `AttentionMetadata`; the batch's own K and V are already written.
        scale: multiplies the scores, usually D ** -0.5.
        sliding_window: W; a token sees itself and the W - 1 tokens before it. None: all before it.

    Returns:
        [T, H, D], contiguous.

    Raises:
        ValueError: the metadata does not fit the batch or the cache.
    """
    output = kernels.empty(*query.shape)  # [T, H, D]
    kernels.paged_attention(
        output,
        query,
        k_cache,
        v_cache,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        scale,
        sliding_window,
    )
    return output
