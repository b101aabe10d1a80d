"""From a trace to what the page draws: nothing may be lost, and nothing invented."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.compare import first_difference, make_comparison
from app.facts import facts
from app.presets import PRESETS, Preset, preset
from app.runs import Run, record
from app.state import label, make_page, make_view
from app.timeline import slots, timeline
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.trace_file import decode_order
from reference.frontend.trace_run import summarise
from reference.frontend.workload import Workload, WorkloadRequest


def run_side(chosen: Preset, side: int, tier_name: str = "reference") -> Run:
    return record("a run", chosen.workload(side), tier_name=tier_name, is_static=chosen.sides[side].is_static)


ALL_SIDES = [(chosen, side) for chosen in PRESETS for side in range(len(chosen.sides))]
every_side = pytest.mark.parametrize(
    ("chosen", "side"), ALL_SIDES, ids=[f"{chosen.key}-{side}" for chosen, side in ALL_SIDES]
)


class Unfolded:
    """Steps put together again, as the browser does it."""

    def __init__(self, view: dict[str, Any]) -> None:
        self.view = view
        self.queues: dict[str, list[int]] = {"run": [], "wait": [], "swap": [], "held": []}
        self.tables: dict[int, list[int]] = {}
        self.free: list[int] = []
        self.hashes: dict[int, str] = {}
        self.rows: dict[int, list[int]] = {}

    def advance(self, step: dict[str, Any]) -> None:
        self.queues.update({name: step[name] for name in self.queues if name in step})
        for r, blocks in step.get("grow", {}).items():
            self.tables[int(r)] = [*self.tables[int(r)], *blocks]
        self.tables.update({int(r): table for r, table in step.get("tables", {}).items()})
        for r in step.get("gone", []):
            del self.tables[r]
        if "free" in step:
            self.free = decode_order(self.free, step["free"])
        for block, text in step.get("hash", []):
            self.hashes.pop(block, None)
            if text is not None:
                self.hashes[block] = text
        before = self.rows
        rows = [row if isinstance(row, list) else decoding_on(before[row]) for row in step["sched"]]
        self.rows = {row[0]: row for row in rows}


def decoding_on(row: list[int]) -> list[int]:
    """What an index alone stands for, where a row is awaited."""
    index, count, _, start, known, _, _ = row
    return [index, 1, 1, start + count, known + 1, 0, 0]


@every_side
def test_the_steps_put_together_are_the_trace(chosen: Preset, side: int, tier_name: str) -> None:
    run = run_side(chosen, side, tier_name)
    view = json.loads(json.dumps(make_view(run)))
    names = [request["id"] for request in view["requests"]]
    unfolded = Unfolded(view)
    for trace, step in zip(run.traces, view["steps"], strict=True):
        unfolded.advance(step)
        cache = trace.state.cache
        assert {names[r]: tuple(table) for r, table in unfolded.tables.items()} == cache.block_tables
        assert tuple(unfolded.free) == cache.free_order
        assert unfolded.hashes == {block: text[:8] for block, text in cache.hashes.items()}
        assert [names[r] for r in unfolded.queues["run"]] == list(trace.state.running)
        assert [names[r] for r in unfolded.queues["wait"]] == list(trace.state.waiting)
        assert [names[r] for r in unfolded.queues["swap"]] == list(trace.state.swapped)
        rows = unfolded.rows.values()
        assert {names[row[0]]: row[1] for row in rows} == trace.num_scheduled_tokens
        for r, _, is_decode, start, known, _, _ in rows:
            assert is_decode == (trace.kinds[names[r]] == "decode")
            assert start + trace.num_scheduled_tokens[names[r]] == trace.state.num_computed_tokens[names[r]]
            assert known == trace.state.num_tokens[names[r]]
        pieces = view["pieces"]
        texts = {names[int(r)]: [pieces[p] for p in ids] for r, ids in step.get("tok", {}).items()}
        assert texts == {
            name: [run.info.pieces[i] for i in ids] for name, ids in trace.sampled_token_ids.items()
        }


@every_side
def test_what_changed_in_a_step_accounts_for_every_block(chosen: Preset, side: int) -> None:
    run = run_side(chosen, side)
    held: set[int] = set()
    for trace, step in zip(run.traces, make_view(run)["steps"], strict=True):
        gained = {*step.get("alloc", []), *step.get("hit", [])}
        held = (held | gained) - set(step.get("freed", []))
        assert held == set(trace.state.cache.ref_counts)
        assert set(step.get("evict", [])) == set(trace.state.cache.evicted)
        assert step.get("copy", []) == [list(copy) for copy in trace.block_copies]


@every_side
def test_every_request_has_one_doing_in_every_step_of_its_life(chosen: Preset, side: int) -> None:
    run = run_side(chosen, side)
    for request, row in zip(run.info.requests, timeline(run, run.info.requests), strict=True):
        steps = [n for _, start, length, _ in row["segments"] for n in range(start, start + length)]
        assert steps == list(range(steps[0], row["end"] + 1)), request.request_id
        assert row["latency_steps"] == row["end"] - request.arrival + 1
        assert 1 <= row["ttft_steps"] <= row["latency_steps"]
        prefilled = sum(tokens for kind, _, _, tokens in row["segments"] if kind == "prefill")
        counted = sum(
            trace.num_scheduled_tokens.get(request.request_id, 0)
            for trace in run.traces
            if trace.kinds.get(request.request_id) == "prefill"
        )
        assert prefilled == counted


@every_side
def test_facts_agree_with_the_totals_of_twinfer_trace(chosen: Preset, side: int) -> None:
    run = run_side(chosen, side)
    summary, found = summarise(run.traces), facts(run)
    assert found["num_steps"] == summary.num_steps
    assert found["num_preemptions"] == summary.num_preemptions
    assert found["num_copies"] == summary.num_block_copies
    assert found["num_accepted"] == summary.num_accepted_tokens
    assert set(chosen.facts) <= set(found)
    asked = sum((request.params.max_tokens or 0) * request.params.n for request in chosen.requests)
    assert found["num_sampled_tokens"] == asked


@pytest.mark.parametrize("chosen", PRESETS, ids=[chosen.key for chosen in PRESETS])
def test_both_tiers_give_the_same_picture_of_every_preset(chosen: Preset) -> None:
    for side in range(len(chosen.sides)):
        left, right = run_side(chosen, side, "reference"), run_side(chosen, side, "fast")
        assert first_difference(left, right) is None
        assert make_comparison(left, right, is_same_workload=True).get("step") is None


def lesson(key: str) -> list[dict[str, Any]]:
    chosen = preset(key)
    return [facts(run_side(chosen, side)) for side in range(len(chosen.sides))]


def test_continuous_batching_takes_fewer_steps_for_the_same_tokens() -> None:
    static, continuous = lesson("continuous")
    assert continuous["num_steps"] < 0.75 * static["num_steps"]
    assert continuous["num_sampled_tokens"] == static["num_sampled_tokens"]


def test_chunks_bound_the_largest_step() -> None:
    whole, chunked = lesson("chunked")
    assert whole["largest_step"] > 50
    assert chunked["largest_step"] <= 12


def test_the_shared_prompt_is_computed_once() -> None:
    without, cached = lesson("prefix")
    assert without["num_cached_tokens"] == 0
    assert cached["num_cached_tokens"] == 48  # three requests find the four full blocks of the first
    assert cached["num_prefill_tokens"] == without["num_prefill_tokens"] - 48
    assert cached["most_holders"] == 4


def test_of_four_samples_three_copy_and_the_last_writes_in_place() -> None:
    (only,) = lesson("copy")
    assert (only["num_copies"], only["most_holders"]) == (3, 4)


def test_recompute_pays_in_tokens_and_swap_in_copies() -> None:
    recompute, swap = lesson("preemption")
    assert recompute["num_preemptions"] > 0
    assert swap["num_preemptions"] > 0
    assert recompute["num_swapped_blocks"] == 0 < swap["num_swapped_blocks"]
    assert recompute["num_prefill_tokens"] > swap["num_prefill_tokens"]


def test_the_urgent_request_answers_sooner_by_priority() -> None:
    fcfs, priority = lesson("priority")
    assert priority["urgent_ttft"] <= fcfs["urgent_ttft"] / 2


def test_smaller_blocks_waste_fewer_slots_and_make_longer_tables() -> None:
    large, medium, small = lesson("blocksize")
    assert medium["wasted_slots"] < large["wasted_slots"] / 2
    assert small["wasted_slots"] < large["wasted_slots"] / 4
    assert small["longest_table"] > medium["longest_table"] > large["longest_table"]


def test_speculation_gives_the_same_text_in_fewer_steps() -> None:
    chosen = preset("speculation")
    plain, drafts = run_side(chosen, 0), run_side(chosen, 1)
    assert facts(drafts)["num_steps"] < facts(plain)["num_steps"] / 2
    assert facts(drafts)["num_rejected"] > 0

    def texts(run: Run) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for trace in run.traces:
            for name, ids in trace.sampled_token_ids.items():
                found.setdefault(name, []).extend(ids)
        return found

    assert texts(plain) == texts(drafts)


def test_contiguous_memory_stays_mostly_empty_and_pages_do_not() -> None:
    contiguous, paged = lesson("contiguous")
    assert contiguous["mean_fill"] < 25
    assert paged["mean_fill"] > 80
    assert paged["peak_running"] > 2 * contiguous["peak_running"]


def test_a_pool_too_small_preempts_again_and_again() -> None:
    small, enough = lesson("small")
    assert small["num_preemptions"] >= 3
    assert enough["num_preemptions"] == 0
    assert small["num_prefill_tokens"] > 2 * enough["num_prefill_tokens"]


def test_static_batching_keeps_requests_out_until_the_batch_has_ended() -> None:
    chosen = preset("continuous")
    view = make_view(run_side(chosen, 0))
    held = [kind for request in view["requests"] for kind, *_ in request["segments"] if kind == "held"]
    assert len(held) == 4
    assert view["steps"][0]["held"] == [4, 5, 6, 7]


@every_side
def test_slots_are_those_of_every_table_counted_anew(chosen: Preset, side: int) -> None:
    run = run_side(chosen, side)
    size = run.info.block_size
    for trace, counted in zip(run.traces, slots(run.traces, size), strict=True):
        fill: dict[int, int] = {}
        for name, table in trace.state.cache.block_tables.items():
            computed = trace.state.num_computed_tokens.get(name, 0)
            for place, block in enumerate(table):
                here = min(max(computed - place * size, 0), size)
                fill[block] = max(fill.get(block, 0), here)
        fill.pop(0, None)
        assert counted == (sum(fill.values()), size * len(fill))


def test_a_long_run_is_sent_as_what_changes() -> None:
    requests = tuple(
        WorkloadRequest(
            f"r{i}", prompt="one " * (i + 1), params=SamplingParams(max_tokens=40, ignore_eos=True)
        )
        for i in range(4)
    )
    view = make_view(record("x", Workload(requests, {"block_size": 4, "num_blocks": 99})))
    for step in view["steps"][2:-1]:
        assert step["sched"] == [0, 1, 2, 3]  # each decodes on
        assert "tables" not in step
        assert all(len(blocks) == 1 for blocks in step.get("grow", {}).values())


def test_slots_of_a_shared_block_count_once() -> None:
    run = run_side(preset("copy"), 0)
    filled, held = slots(run.traces, 4)[1]  # three copies are made: two shared blocks and four of their own
    assert held == 4 * 6
    assert filled == 2 * 4 + 4 * 3


def test_labels_go_on_behind_z() -> None:
    assert [label(i) for i in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


def test_the_first_difference_names_the_step_the_request_and_both_values() -> None:
    def go(prompt: str) -> Run:
        request = WorkloadRequest("a", prompt=prompt, params=SamplingParams(max_tokens=3, ignore_eos=True))
        return record("x", Workload((request,), {"block_size": 2, "num_blocks": 9}))

    assert first_difference(go("one two three"), go("one two three")) is None
    difference = first_difference(go("one two three"), go("one two three four five"))
    assert difference is not None
    assert (difference.step, difference.what, difference.request_id) == (0, "num_scheduled_tokens", "a")
    assert difference.values == (3, 5)
    page = make_page([go("one two three"), go("one two three four five")])
    (comparison,) = page["comparisons"]
    assert comparison["values"] == ["3", "5"]
    assert comparison["say"]["en"] == "“x” and “x” part in step 0: a computes 3 tokens in “x” and 5 in “x”."


def test_pools_cut_differently_part_where_their_tables_do_and_not_in_their_free_queues() -> None:
    large, _, small = (run_side(preset("blocksize"), side) for side in range(3))
    difference = first_difference(large, small)
    assert difference is not None
    assert (difference.what, difference.request_id) == ("block_tables", "dan")
    assert [len(table) for table in difference.values] == [1, 2]


def test_every_sentence_exists_in_both_languages() -> None:
    for chosen, side in ALL_SIDES:
        for step in make_view(run_side(chosen, side))["steps"]:
            assert step["say"]["en"].startswith(f"Step {step['n']}: ")
            assert step["say"]["zh"].startswith(f"第 {step['n']} 步：")
    view = make_view(run_side(preset("preemption"), 1))
    preempting = next(step for step in view["steps"] if "pre" in step)
    assert "C is preempted; 4 blocks are swapped out" in preempting["say"]["en"]
    assert preempting["pre"][0][1].startswith("preempted cleo: ann needed 1 block, 0 free")


def test_one_token_is_not_one_tokens() -> None:
    request = WorkloadRequest("a", prompt="word", params=SamplingParams(max_tokens=2))
    view = make_view(record("x", Workload((request,), {"block_size": 2, "num_blocks": 9})))
    assert view["steps"][0]["say"]["en"] == "Step 0: A prefills 1 token."
