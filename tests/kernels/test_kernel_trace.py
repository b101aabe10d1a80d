"""The record of a traced kernel: slots and tokens, values in shared memory, source lines, and the JSON document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fast import kernels
from fast.kernel_trace import KernelTrace, WarpEvent
from tests.kernels.ladders import random, rungs_of
from tests.kernels.paged_batches import make_chunks, make_decode

LADDER = kernels.ladder("simt")


def traced_decode(rung: str, lengths: list[int], block: tuple[int, int, int], **options: Any) -> KernelTrace:
    batch = make_decode(lengths, 4, 2, 64, 8, torch.float32)
    return kernels.trace_kernel(
        kernels.ladder("simt", **options),
        "paged_attention",
        torch.empty_like(batch.query),
        batch.query,
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        batch.seq_lens,
        batch.scale,
        rung=rung,
        block=block,
    )


def reads_of(trace: KernelTrace, array: str) -> set[tuple[int, int, int, tuple[int, int] | None]]:
    """(slot, head, dimension, token) of every number that a lane of the traced block read."""
    seen = set()
    for event in trace.events:
        if event.did == "read" and set(event.arrays) == {array}:
            for slot, head, dim, token in zip(
                event.slots, event.heads, event.dims, event.tokens, strict=True
            ):
                seen |= {(slot, head, dim + i, token) for i in range(event.width // 4)}
    return seen


@pytest.mark.parametrize("array", ["k_cache", "v_cache"])
@pytest.mark.parametrize("rung", rungs_of("paged_attention")[:4])
def test_a_decode_reads_each_slot_of_its_tokens_and_no_other(rung: str, array: str) -> None:
    """The traced block has head 3 of sequence 1, which reads KV head 1; of the naive rung, all heads of both."""
    lengths = [5, 21]
    batch = make_decode(lengths, 4, 2, 64, 8, torch.float32)
    naive = rung == "v1_naive"
    trace = traced_decode(rung, lengths, (0, 0, 0) if naive else (3, 1, 0))
    tables = batch.block_tables.tolist()
    expected = {
        (tables[s][p // 8] * 8 + p % 8, head, dim, (s, p))
        for s in ([0, 1] if naive else [1])
        for p in range(lengths[s])
        for head in ([0, 1] if naive else [1])
        for dim in range(64)
    }
    assert reads_of(trace, array) == expected


def test_a_written_cache_names_the_tokens_that_were_written() -> None:
    key, value = (random(3, 2, 64, dtype=torch.float32, seed=s) for s in (1, 2))
    caches = [torch.zeros(4, 8, 2, 64) for _ in range(2)]
    slots = torch.tensor([17, 3, 30])
    trace = kernels.trace_kernel(
        LADDER, "reshape_and_cache", key, value, *caches, slots, rung="v2_vectorised", block=(1, 0, 0)
    )
    written = {
        (event.arrays[i], event.slots[i], event.tokens[i])
        for event in trace.events
        for i in range(len(event.slots))
        if event.did == "write"
    }
    assert written == {("k_cache", 3, (0, 1)), ("v_cache", 3, (0, 1))}


def test_the_tree_in_shared_memory_is_seen_value_by_value() -> None:
    """Sum of squares of 256 ones and twos: each step of the tree halves the numbers and doubles what they are."""
    x = torch.ones(1, 256)
    trace = kernels.trace_kernel(
        LADDER, "rms_norm", torch.empty_like(x), x, torch.ones(256), 0.0, rung="v2_tree"
    )
    for step in range(9):
        written = [
            number
            for event in trace.events
            if event.phase == step and event.did == "write" and event.space == "shared"
            for (number,) in event.values
        ]
        assert written == [2.0**step] * (256 >> step)


def test_shuffled_and_watched_registers_have_their_values() -> None:
    trace = traced_decode("v1_naive", [3], (0, 0, 0))
    watched = [event for event in trace.events if event.did == "watch"]
    assert [trace.sites[event.site].name for event in watched] == ["largest", "sum"] * 3
    largest = [event.values[0][0] for event in watched[::2]]
    sums = [event.values[0][0] for event in watched[1::2]]
    assert largest == sorted(largest, key=lambda x: x or 0.0)  # the running maximum never falls
    assert sums[0] == 1.0
    x = torch.arange(1.0, 33.0).repeat(8)[None]
    trace = kernels.trace_kernel(
        LADDER, "rms_norm", torch.empty_like(x), x, torch.ones(256), 0.0, rung="v3_shuffle"
    )
    first = next(event for event in trace.events if event.did == "warp")
    assert first.values == tuple((float(lane * lane),) for lane in range(1, 33))
    assert trace.counts.shuffles == 8 * 5


def test_sites_are_lines_of_the_kernel_and_its_inlined_functions(repository: Path) -> None:
    trace = traced_decode("v3_vectorised", [20], (0, 0, 0))
    loads = [each for each in trace.by_site if each.array == "k_cache"]
    assert [each.width for each in loads] == [16]
    site = trace.sites[loads[0].site]
    assert [function for *_, function in site.frames] == [
        "load_vector",
        "HeadSlice::load",
        "attend_logits",
        "paged_attention_v3_vectorised",
    ]
    file, line, _ = site.frames[2]
    assert "Slice::load(a.k_cache" in (repository / file).read_text().splitlines()[line - 1]


def test_a_trace_changes_no_bit_and_its_counts_do_not_depend_on_the_order_of_threads() -> None:
    batch = make_chunks([(20, 12), (9, 9)], 4, 2, 64, 8, torch.float16)
    arguments = (batch.k_cache, batch.v_cache, batch.block_tables, batch.query_start_loc, batch.seq_lens)
    for rung in rungs_of("prefill_attention"):
        outs = [torch.empty_like(batch.query) for _ in range(3)]
        LADDER.prefill_attention(outs[0], batch.query, *arguments, 0.125, rung=rung)
        traces = [
            kernels.trace_kernel(
                kernels.ladder("simt", seed=seed, threads=2),
                "prefill_attention",
                out,
                batch.query,
                *arguments,
                0.125,
                rung=rung,
            )
            for seed, out in enumerate(outs[1:])
        ]
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])
        assert traces[0].counts == traces[1].counts


def test_memory_between_two_kernels_has_a_name_and_both_launches_are_there() -> None:
    trace = traced_decode("v4_split_kv", [300], (0, 0, 0))
    assert [launch.grid for launch in trace.launches] == [(4, 1, 2), (4, 1, 1)]
    written = {each.array for each in trace.by_site if each.launch == 0 and each.did == "write"}
    read = {each.array for each in trace.by_site if each.launch == 1 and each.did == "read"}
    assert {"split_out", "split_max", "split_sum"} <= written & read
    assert {event.launch for event in trace.events} == {0, 1}


def test_the_document_is_json_without_nan_and_events_agree_with_themselves() -> None:
    trace = traced_decode("v2_shared_reduce", [20], (2, 0, 0))
    document = json.loads(trace.to_json())
    assert (document["format"], document["version"]) == ("twinfer-kernel-trace", 1)
    assert document["scalars"] == {"scale": 0.125, "window": 0}
    assert {each["name"] for each in document["shared_arrays"]} == {"logits", "query", "scratch"}
    assert document["counts"]["barriers"] == trace.counts.barriers
    for event in document["events"]:
        assert event["site"] < len(document["sites"])
        per_lane = ("arrays", "offsets", "values", "slots", "heads", "dims", "tokens")
        assert {len(event[key]) for key in per_lane if key in event} <= {len(event["lanes"])}


def test_only_events_of_the_chosen_block_are_kept_and_counts_are_of_all() -> None:
    one, other = (traced_decode("v2_shared_reduce", [20, 9], block) for block in [(0, 0, 0), (1, 1, 0)])
    nowhere = traced_decode("v2_shared_reduce", [20, 9], (9, 9, 9))
    assert one.counts == other.counts == nowhere.counts
    assert len(one.events) > len(other.events) > len(nowhere.events) == 0


def test_what_a_trace_cannot_run_is_refused_and_leaves_no_recording_behind() -> None:
    with pytest.raises(ValueError, match="operation: expected a method of Ladder, got 'divide'"):
        kernels.trace_kernel(LADDER, "divide")
    with pytest.raises(ValueError, match="rung: expected one of"):
        traced_decode("v9", [5], (0, 0, 0))
    assert traced_decode("v1_naive", [5], (0, 0, 0)).counts.blocks == 1


def lanes_of(events: tuple[WarpEvent, ...], warp: int) -> list[tuple[int, ...]]:
    return [event.lanes for event in events if event.warp == warp]


def test_lanes_past_the_end_take_no_part() -> None:
    x = torch.ones(3, 8)
    trace = kernels.trace_kernel(LADDER, "softmax", torch.empty_like(x), x, rung="v1_naive")
    assert set(lanes_of(trace.events, 0)) == {(0, 1, 2)}
    assert lanes_of(trace.events, 1) == []
