"""paged_attention, rung by rung, under the emulator: ragged decode batches against the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fast import kernels
from fast.ladder import Ladder
from tests.kernels import oracles
from tests.kernels.ladders import (
    ATTENTION,
    ORDERS,
    Rung,
    assert_attention,
    every_dtype,
    every_rung,
    padded,
    poisoned,
    random,
)
from tests.kernels.oracles import assert_close

# Around a block of 16, the 128 threads of a block, and the 256 positions of a split; a sequence of one token.
LENGTHS = [1, 33, 130, 257]


@dataclass(frozen=True)
class Decode:
    """Arguments of one call. Blocks are scattered, and every slot that no token owns holds NaN."""

    query: torch.Tensor  # [S, H, D]
    k_cache: torch.Tensor  # [N, B, Hkv, D]
    v_cache: torch.Tensor  # [N, B, Hkv, D]
    block_tables: torch.Tensor  # [S, max_blocks]
    seq_lens: torch.Tensor  # [S]
    window: int = 0

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1]) ** -0.5

    def run(self, ladder: Ladder, rung: str) -> torch.Tensor:
        out = padded(torch.full_like(self.query, float("nan")), 16)
        ladder.paged_attention(
            out,
            padded(self.query, 8),
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.seq_lens,
            self.scale,
            self.window,
            rung,
        )
        return out

    def expected(self) -> oracles.Floats:
        block_size = self.k_cache.shape[1]
        out = np.zeros(tuple(self.query.shape))
        for s, length in enumerate(self.seq_lens.tolist()):
            begin = max(0, length - self.window) if self.window else 0
            slots = [
                (int(self.block_tables[s, p // block_size]), p % block_size) for p in range(begin, length)
            ]
            if not slots:
                continue
            blocks, offsets = (torch.tensor(column) for column in zip(*slots, strict=True))
            keys, values = self.k_cache[blocks, offsets], self.v_cache[blocks, offsets]  # [n, Hkv, D]
            query = self.query[s : s + 1].double().numpy()
            out[s] = oracles.attention(query, keys.double().numpy(), values.double().numpy(), self.scale)[0]
        return out


def make_decode(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> Decode:
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 2
    shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    tables = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)  # -1 must not be read
    k_cache, v_cache = (poisoned(num_blocks, block_size, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    used = 0
    for s, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        blocks = shuffled[used : used + count]
        tables[s, :count] = blocks
        used += count
        slots = (blocks.long()[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
        for cache, offset in ((k_cache, 1000), (v_cache, 2000)):
            rows = random(length, kv_heads, head_dim, dtype=dtype, seed=seed + offset + s)
            cache.view(-1, kv_heads, head_dim)[slots] = rows
    query = random(len(lengths), heads, head_dim, dtype=dtype, seed=seed + 3000)
    return Decode(query, k_cache, v_cache, tables, torch.tensor(lengths, dtype=torch.int32))


@every_rung("paged_attention")
@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_ragged_batch_equals_the_oracle(rung: Rung, dtype: torch.dtype, head_dim: int) -> None:
    batch = make_decode(LENGTHS, 3, 1, head_dim, 16, dtype)
    assert_attention(batch.run, batch.expected(), rung, dtype)


@every_rung("paged_attention")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (4, 4, 80, 8, torch.float32),
        (5, 1, 33, 32, torch.bfloat16),
        (6, 2, 5, 1, torch.float16),
        (2, 1, 256, 4, torch.float32),
        (9, 3, 64, 32, torch.float16),
        (20, 1, 64, 16, torch.bfloat16),  # more heads of a KV head than a product has rows
        (7, 1, 128, 8, torch.bfloat16),
    ],
)
def test_any_head_dim_block_size_and_number_of_heads_equals_the_oracle(
    rung: Rung, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    batch = make_decode([40, 1, 67], heads, kv_heads, head_dim, block_size, dtype, seed=head_dim)
    assert_attention(batch.run, batch.expected(), rung, dtype)


@every_rung("paged_attention")
@pytest.mark.parametrize("window", [1, 16, 100, 1000])
def test_a_window_sees_only_the_newest_tokens_and_never_reads_blocks_left_of_it(
    rung: Rung, window: int
) -> None:
    dtype = torch.float32 if rung.takes(torch.float32, 64) else torch.float16
    batch = replace(make_decode(LENGTHS, 2, 1, 64, 16, dtype), window=window)
    expected = batch.expected()
    for s, length in enumerate(batch.seq_lens.tolist()):
        batch.block_tables[s, : max(0, length - window) // 16] = -1
    assert_attention(batch.run, expected, rung, dtype)


@every_rung("paged_attention")
def test_many_splits_are_joined_on_one_scale(rung: Rung) -> None:
    """Logits that differ by hundreds between splits: a split's weight may be nothing, or all."""
    dtype = torch.float32 if rung.takes(torch.float32, 64) else torch.float16
    batch = make_decode([1100, 700], 2, 1, 64, 16, dtype)
    batch.k_cache[batch.block_tables[0, 40].long()] *= 60.0
    batch.k_cache[batch.block_tables[1, 3].long()] *= 60.0
    assert_attention(batch.run, batch.expected(), rung, dtype)


@every_rung("paged_attention")
def test_a_padding_row_of_no_tokens_is_zero(rung: Rung) -> None:
    dtype = torch.float32 if rung.takes(torch.float32, 64) else torch.float16
    batch = make_decode([20, 0, 3], 3, 1, 64, 16, dtype)
    out = batch.run(rung.ladder, rung.name)
    assert_close(out, batch.expected(), ATTENTION[dtype])
    assert torch.equal(out[1], torch.zeros(3, 64, dtype=dtype))


@pytest.mark.parametrize("rung", kernels.ladder("simt").rungs["paged_attention"])
@pytest.mark.parametrize("shape", range(6))
def test_random_ragged_batches_equal_the_oracle(rung: str, shape: int) -> None:
    rng = np.random.default_rng(shape)
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    dtype = [torch.float32, torch.float16, torch.bfloat16][shape % 3]
    lengths = rng.integers(1, 300, size=int(rng.integers(1, 4))).tolist()
    head_dim, block_size = int(rng.choice([64, 128, 96])), int(rng.choice([8, 16, 32]))
    batch = make_decode(lengths, kv_heads * group, kv_heads, head_dim, block_size, dtype, seed=shape)
    seed, threads = ORDERS[shape % len(ORDERS)]
    case = Rung(rung, kernels.ladder("simt", seed=seed + 10, threads=threads))
    assert_attention(batch.run, batch.expected(), case, dtype)


@pytest.mark.parametrize("rung", kernels.ladder("simt").rungs["paged_attention"])
def test_values_are_the_same_bits_for_every_order_of_threads(rung: str) -> None:
    batch = make_decode(LENGTHS, 3, 1, 64, 16, torch.float16)
    outs = [batch.run(kernels.ladder("simt", seed=s, threads=t), rung) for s, t in [(0, 1), (5, 1), (6, 2)]]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_caches_that_start_anywhere_take_the_path_without_vectors() -> None:
    batch = make_decode([40], 2, 1, 64, 16, torch.float32)
    storage = torch.empty(batch.k_cache.numel() + 1)
    shifted = storage[1:].view(batch.k_cache.shape)  # 4 bytes past a multiple of 16
    shifted.copy_(batch.k_cache)
    out = replace(batch, k_cache=shifted).run(kernels.ladder("simt"), "")
    assert_close(out, batch.expected(), ATTENTION[torch.float32])


def test_a_context_too_long_for_shared_memory_is_refused_in_a_sentence() -> None:
    batch = make_decode([30_000], 1, 1, 8, 16, torch.float32)
    for rung in ("v2_shared_reduce", "v3_vectorised"):
        with pytest.raises(ValueError, match=r"got 30000; use v4_split_kv or v5_grouped"):
            batch.run(kernels.ladder("simt"), rung)
