"""What each kernel must compute, written plainly in float64 NumPy, and the one way errors are measured.

Shapes: T tokens, S sequences, H query heads, Hkv KV heads, D head dim, B block size, N blocks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ELEMENTWISE_TOLERANCE = 2e-6  # float32 rounds at 6e-8; a norm sums thousands of squares in a few lanes
ATTENTION_TOLERANCE = 1e-5  # two dot products of up to thousands of terms and an exponential


def assert_close(actual: torch.Tensor, expected: Floats, tolerance: float) -> None:
    """|actual - expected| <= tolerance * max(1, largest |expected|), everywhere; NaN never passes."""
    assert tuple(actual.shape) == expected.shape
    error = np.abs(actual.double().numpy() - expected)
    bound = tolerance * max(1.0, float(np.abs(expected).max(initial=0.0)))
    assert np.all(error <= bound), f"largest error {error.max()} exceeds {bound}"


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float) -> Floats:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps) * weight + bias


def gelu(x: Floats) -> Floats:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu_and_mul(gate_up: Floats) -> Floats:
    gate, up = np.split(gate_up, 2, axis=-1)
    return gate / (1.0 + np.exp(-gate)) * up


def rotary_embedding(positions: Ints, heads: Floats, cos_sin_cache: Floats) -> Floats:
    """heads [T, H, D] rotated: dimensions i and i + D/2 are the two coordinates of one point."""
    half = heads.shape[-1] // 2
    cos = cos_sin_cache[positions, None, :half]  # [T, 1, D/2]
    sin = cos_sin_cache[positions, None, half:]  # [T, 1, D/2]
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    query: Floats, keys: Floats, values: Floats, scale: float, sliding_window: int | None = None
) -> Floats:
    """query [T, H, D] are the last T of the tokens whose keys and values are [context, Hkv, D]."""
    num_tokens, num_heads, _ = query.shape
    context, num_kv_heads, _ = keys.shape
    out = np.empty_like(query)
    for t in range(num_tokens):
        end = context - num_tokens + t + 1
        visible = slice(0 if sliding_window is None else max(end - sliding_window, 0), end)
        for h in range(num_heads):
            kv_head = h // (num_heads // num_kv_heads)
            scores = keys[visible, kv_head] @ query[t, h] * scale  # [visible]
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ values[visible, kv_head] / weights.sum()
    return out


def paged_attention(
    query: Floats,
    k_cache: Floats,
    v_cache: Floats,
    block_tables: Ints,
    query_start_loc: Ints,
    seq_lens: Ints,
    scale: float,
    sliding_window: int | None = None,
) -> Floats:
    """Zeros for the rows of a sequence without a token, which only pad."""
    block_size = k_cache.shape[1]
    out = np.zeros_like(query)
    for s, length in enumerate(seq_lens):
        if length == 0:
            continue
        slots = [(block_tables[s, p // block_size], p % block_size) for p in range(length)]
        keys = np.array([k_cache[block, offset] for block, offset in slots])  # [length, Hkv, D]
        values = np.array([v_cache[block, offset] for block, offset in slots])  # [length, Hkv, D]
        rows = slice(query_start_loc[s], query_start_loc[s + 1])
        out[rows] = attention(query[rows], keys, values, scale, sliding_window)
    return out


def philox4x32_10(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Philox of Salmon et al. (SC 2011) in Python's integers."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & mask,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def gumbel_noise(seed: int, output_position: int, vocab_size: int) -> Floats:
    key = (seed & 0xFFFFFFFF, seed >> 32)
    blocks = [philox4x32_10((i, output_position, 0, 0), key) for i in range((vocab_size + 3) // 4)]
    words = np.array(blocks, dtype=np.float64).reshape(-1)[:vocab_size]
    return -np.log(-np.log((words + 0.5) * 2.0**-32))


def kept_tokens(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> Ints:
    """Token ids left by min_p, then top-k, then top-p, most likely first, equals by ascending id."""
    z = logits / temperature
    order = np.argsort(-z, kind="stable")
    if min_p > 0.0:
        order = order[np.exp(z[order] - z[order[0]]) >= min_p]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        weights = np.exp(z[order] - z[order[0]])
        cumulative = np.cumsum(weights / weights.sum())
        order = order[: int(np.searchsorted(cumulative, top_p)) + 1]
    return order


def sample(
    logits: Floats,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    output_position: int,
    min_p: float = 0.0,
) -> int:
    if np.isnan(logits).any():
        return -1
    if temperature < 1e-5:
        return int(np.argmax(logits))
    kept = np.sort(
        kept_tokens(logits, temperature, top_k, top_p, min_p)
    )  # argmax then takes the lowest of equals
    scores = logits[kept] / temperature + gumbel_noise(seed, output_position, logits.size)[kept]
    return int(kept[np.argmax(scores)])


def process_logits(
    logits: Floats,
    allowed: Sequence[int],
    masked: Sequence[int],
    biases: Mapping[int, float],
    counts: Mapping[int, int],
    repetition: float,
    presence: float,
    frequency: float,
) -> Floats:
    """One float32 row, token by token. `counts` has the tokens that penalties look at; no allowed ids allow all."""
    largest = float(np.finfo(np.float32).max)
    processed = logits.copy()
    for i in range(len(logits)):
        if (allowed and i not in allowed) or i in masked or logits[i] == -np.inf:
            processed[i] = -np.inf
            continue
        if i in biases:
            processed[i] = np.float32(min(max(float(processed[i]) + biases[i], -largest), largest))
        if i in counts:
            z = float(processed[i])
            z = z / repetition if z > 0 else z * repetition
            z = z - frequency * counts[i]
            z = z - (presence if counts[i] else 0.0)
            processed[i] = np.float32(min(max(z, -largest), largest))
    return processed
