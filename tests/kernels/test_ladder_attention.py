"""The ladders of attention, rung by rung, under the emulator: ragged batches against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fast import kernels
from tests.kernels.ladders import ATTENTION, ORDERS, Rung, every_dtype, every_rung, ladder, rungs_of
from tests.kernels.oracles import assert_close
from tests.kernels.paged_batches import PagedBatch, make_chunks, make_decode, random_batch

OPERATIONS = ("paged_attention", "prefill_attention")

# Around a block of 16, the 128 threads of a block, and the 256 positions of a split; a sequence of one token.
LENGTHS = [1, 33, 130, 257]
# A whole prompt, a chunk behind cached blocks, a decoded token, a sequence with nothing to compute, a whole tile.
MIXED = [(37, 37), (50, 20), (33, 1), (10, 0), (16, 16)]

# Of each operation: a batch of the given heads, KV heads, head dim, block size and type.
Make = Callable[..., PagedBatch]
RAGGED: dict[str, Make] = {
    "paged_attention": lambda *shape: make_decode(LENGTHS, *shape),
    "prefill_attention": lambda *shape: make_chunks(MIXED, *shape),
}
SHORT: dict[str, Make] = {
    "paged_attention": lambda *shape: make_decode([40, 1, 67], *shape),
    "prefill_attention": lambda *shape: make_chunks([(21, 9), (18, 18)], *shape),
}
LONGER_THAN_A_WINDOW: dict[str, Make] = {
    "paged_attention": RAGGED["paged_attention"],
    "prefill_attention": lambda *shape: make_chunks([(70, 18), (95, 1), (36, 36)], *shape),
}


def assert_equals_the_oracle(rung: Rung, batch: PagedBatch) -> None:
    """What the rung computes is what the oracle does, or the rung says why it does not take the call."""
    dtype, head_dim = batch.query.dtype, batch.query.shape[-1]
    if rung.takes(dtype, head_dim):
        assert_close(batch.run(rung.ladder, rung.name), batch.expected(), ATTENTION[dtype])
    else:
        with pytest.raises(
            ValueError, match="the tensor cores take float16 and bfloat16 .* use a lower rung"
        ):
            batch.run(rung.ladder, rung.name)


def float32_or_half(rung: Rung) -> torch.dtype:
    return torch.float32 if rung.takes(torch.float32, 64) else torch.float16


@every_rung(*OPERATIONS)
@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_ragged_batch_equals_the_oracle(rung: Rung, dtype: torch.dtype, head_dim: int) -> None:
    assert_equals_the_oracle(rung, RAGGED[rung.operation](3, 1, head_dim, 16, dtype))


@every_rung(*OPERATIONS)
@pytest.mark.parametrize(
    "shape",
    [
        (4, 4, 80, 8, torch.float32),
        (5, 1, 33, 32, torch.bfloat16),
        (6, 2, 5, 1, torch.float16),
        (2, 1, 256, 4, torch.float32),
        (9, 3, 64, 32, torch.float16),
        (
            20,
            1,
            64,
            8,
            torch.bfloat16,
        ),  # more heads of a KV head than a product has rows: one row in two tiles
        (7, 1, 128, 8, torch.bfloat16),
    ],
    ids=lambda shape: "-".join(map(str, shape)),
)
def test_any_head_dim_block_size_and_number_of_heads_equals_the_oracle(
    rung: Rung, shape: tuple[Any, ...]
) -> None:
    assert_equals_the_oracle(rung, SHORT[rung.operation](*shape))


@every_rung(*OPERATIONS)
@pytest.mark.parametrize("window", [1, 16, 40, 100, 1000])
def test_a_window_sees_only_the_newest_tokens_and_never_reads_blocks_left_of_it(
    rung: Rung, window: int
) -> None:
    dtype = float32_or_half(rung)
    batch = replace(LONGER_THAN_A_WINDOW[rung.operation](2, 1, 64, 8, dtype), window=window)
    out = batch.without_unseen_blocks().run(rung.ladder, rung.name)
    assert_close(out, batch.expected(), ATTENTION[dtype])


@pytest.mark.parametrize(
    ("operation", "rung"), [(name, rung) for name in OPERATIONS for rung in rungs_of(name)]
)
@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_batches_equal_the_oracle(operation: str, rung: str, seed: int) -> None:
    order, threads = ORDERS[seed % len(ORDERS)]
    case = Rung(operation, rung, ladder(order + 10, threads))
    assert_equals_the_oracle(case, random_batch(operation, seed))


@pytest.mark.parametrize(
    ("operation", "rung"), [(name, rung) for name in OPERATIONS for rung in rungs_of(name)]
)
def test_values_are_the_same_bits_for_every_order_of_threads(operation: str, rung: str) -> None:
    batch = RAGGED[operation](3, 1, 64, 16, torch.float16)
    outs = [batch.run(kernels.ladder("simt", seed=s, threads=t), rung) for s, t in [(0, 1), (5, 1), (6, 2)]]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_caches_that_start_anywhere_take_the_path_without_vectors(operation: str) -> None:
    batch = SHORT[operation](2, 1, 64, 16, torch.float32)
    storage = torch.empty(batch.k_cache.numel() + 1)
    shifted = storage[1:].view(batch.k_cache.shape)  # 4 bytes past a multiple of 16
    shifted.copy_(batch.k_cache)
    out = replace(batch, k_cache=shifted).run(kernels.ladder("simt"), "")
    assert_close(out, batch.expected(), ATTENTION[torch.float32])


@every_rung("paged_attention")
def test_many_splits_are_joined_on_one_scale(rung: Rung) -> None:
    """Logits that differ by hundreds between splits: a split's weight may be nothing, or all."""
    batch = make_decode([1100, 700], 2, 1, 64, 16, float32_or_half(rung))
    batch.k_cache[batch.block_tables[0, 40].long()] *= 60.0
    batch.k_cache[batch.block_tables[1, 3].long()] *= 60.0
    assert_equals_the_oracle(rung, batch)


@every_rung("paged_attention")
def test_a_padding_row_of_no_tokens_is_zero(rung: Rung) -> None:
    dtype = float32_or_half(rung)
    batch = make_decode([20, 0, 3], 3, 1, 64, 16, dtype)
    out = batch.run(rung.ladder, rung.name)
    assert_close(out, batch.expected(), ATTENTION[dtype])
    assert torch.equal(out[1], torch.zeros(3, 64, dtype=dtype))


def test_a_context_too_long_for_shared_memory_is_refused_in_a_sentence() -> None:
    batch = make_decode([30_000], 1, 1, 8, 16, torch.float32)
    for rung in ("v2_shared_reduce", "v3_vectorised"):
        with pytest.raises(ValueError, match=r"got 30000; use v4_split_kv or v5_grouped"):
            batch.run(kernels.ladder("simt"), rung)


@every_rung("prefill_attention")
def test_a_logit_hundreds_above_the_others_neither_overflows_nor_is_lost(rung: Rung) -> None:
    """It comes first, in the middle, or last: what was summed before it is scaled down to nothing."""
    batch = make_chunks([(80, 30), (80, 30), (80, 80)], 1, 1, 64, 16, float32_or_half(rung))
    batch = replace(batch, query=batch.query.abs())  # so that one key is far above the others for every row
    for seq, position in ((0, 0), (1, 37), (2, 79)):
        batch.k_cache[batch.block_tables[seq, position // 16].long(), position % 16] = 30.0
    assert_equals_the_oracle(rung, batch)


def test_no_rows_at_all_are_no_work() -> None:
    batch = make_chunks([(10, 0), (3, 0)], 2, 1, 64, 16, torch.float32)
    arguments = (batch.k_cache, batch.v_cache, batch.block_tables, batch.query_start_loc, batch.seq_lens)
    kernels.ladder("simt").prefill_attention(batch.query, batch.query, *arguments, batch.scale)
    assert batch.query.shape == (0, 2, 64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": ints(0, 9, 12)}, "to start at 0 and end at T=14, got 0 and 12"),
        (
            {"query_start_loc": ints(0, 15, 14), "seq_lens": ints(16, 20)},
            "query_start_loc: expected ascending values, got -1 rows of sequence 1",
        ),
        ({"query_start_loc": ints(0, 14)}, r"query_start_loc: expected shape \[S\+1=3\], got \[2\]"),
        ({"seq_lens": ints(8, 20)}, r"seq_lens: expected between 9 \(the query rows\) and 48"),
        ({"seq_lens": ints(9, 49)}, r"and 48 \(max_blocks \* B\) of sequence 1, got 49"),
        ({"seq_lens": ints(9, 40)}, r"expected blocks in \[0, 5\), got -1 at entry 2 of sequence 1"),
        ({"window": -1}, r"window: expected at least 0 \(off\), got -1"),
        ({"rung": "v9"}, "rung: expected one of v1_naive.*, got v9"),
    ],
)
def test_arguments_of_chunks_that_do_not_fit_together_are_refused_and_nothing_is_written(
    changes: dict[str, Any], message: str
) -> None:
    batch = make_chunks([(9, 9), (20, 5)], 2, 1, 64, 16, torch.float32)
    arguments = {name: value for name, value in vars(batch).items() if name != "operation"}
    arguments |= {"out": torch.full_like(batch.query, float("nan")), "scale": batch.scale} | changes
    with pytest.raises(ValueError, match=message):
        kernels.ladder("simt").prefill_attention(**arguments)
    assert arguments["out"].isnan().all()
