"""What if: the same workload once more, with other options from a step on or from the beginning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.compare import first_difference
from app.facts import facts
from app.files import load_run, save_run
from app.fork import OPTIONS, fork, fork_lesson, same_memory, settings
from app.presets import preset
from app.runs import Change, Run, record
from app.state import make_page
from reference.contracts.trace import StepTrace
from reference.frontend.engine_args import EngineArgs


def run_of(key: str, side: int = 0, tier_name: str = "reference") -> Run:
    chosen = preset(key)
    return record("A", chosen.workload(side), tier_name=tier_name, is_static=chosen.sides[side].is_static)


def forked(run: Run, step: int, **changes: Any) -> Run:
    *_, last = fork(run, step, changes)
    return last


def timeless(trace: StepTrace) -> StepTrace:
    return replace(trace, started=0.0, seconds=0.0)


@pytest.mark.parametrize(
    ("key", "side", "step", "changes"),
    [
        ("preemption", 0, 6, {"preemption_mode": "swap"}),
        ("preemption", 1, 11, {"preemption_mode": "recompute"}),
        ("continuous", 1, 5, {"max_num_seqs": 1}),
        ("continuous", 0, 4, {"max_num_seqs": 2}),
        ("chunked", 1, 4, {"max_num_batched_tokens": 4}),
        ("priority", 0, 3, {"scheduling_policy": "priority"}),
    ],
)
def test_up_to_the_step_nothing_differs_and_from_there_on_something_does(
    tier_name: str, key: str, side: int, step: int, changes: dict[str, Any]
) -> None:
    run = run_of(key, side, tier_name)
    other = forked(run, step, **changes)
    assert [timeless(t) for t in other.traces[:step]] == [timeless(t) for t in run.traces[:step]]
    difference = first_difference(run, other)
    assert difference is not None
    assert difference.step >= step
    assert other.info.changes == (Change(step, changes),)


def test_both_tiers_fork_alike() -> None:
    for key, step, changes in (
        ("preemption", 6, {"preemption_mode": "swap"}),
        ("priority", 3, {"scheduling_policy": "priority", "max_num_seqs": 2}),
    ):
        left, right = (forked(run_of(key, 0, tier), step, **changes) for tier in ("reference", "fast"))
        assert first_difference(left, right) is None


def test_swapping_from_now_on_swaps_the_next_victim() -> None:
    run = run_of("preemption")
    other = forked(run, 6, preemption_mode="swap")
    assert facts(run)["num_swapped_blocks"] == 0 < facts(other)["num_swapped_blocks"]
    assert facts(other)["num_prefill_tokens"] < facts(run)["num_prefill_tokens"]


def test_what_cannot_change_in_mid_run_is_run_from_the_beginning() -> None:
    run = run_of("copy")
    other = forked(run, 3, block_size=8)
    assert other.info.changes == ()
    assert other.info.block_size == 8
    assert other.info.num_blocks == 13  # 24 usable blocks of 4 slots are 12 of 8
    assert first_difference(run, other).step == 0  # type: ignore[union-attr]
    static = forked(run_of("continuous", 1), 3, static=True, drafts=0)
    assert static.info.is_static
    drafts = forked(run_of("speculation"), 3, drafts=2)
    assert facts(drafts)["num_accepted"] > 0


def test_blocks_of_another_size_share_out_the_same_memory() -> None:
    info = run_of("blocksize").info  # 8 usable blocks of 32
    assert [same_memory(info, size) - 1 for size in (8, 16, 32, 100, 1000)] == [32, 16, 8, 3, 1]


def test_a_fork_can_be_forked_again_and_keeps_its_past() -> None:
    first = forked(run_of("continuous", 1), 4, max_num_seqs=2)
    second = forked(first, 9, max_num_seqs=4)
    assert [change.step for change in second.info.changes] == [4, 9]
    assert [timeless(t) for t in second.traces[:9]] == [timeless(t) for t in first.traces[:9]]
    assert settings(second.info)["max_num_seqs"] == 4
    again = forked(second, 6, max_num_seqs=3)  # what came after step 6 has not happened
    assert [change.step for change in again.info.changes] == [4, 6]


def test_a_fork_is_saved_loaded_and_forked_from_the_file(tmp_path: Path) -> None:
    run = forked(run_of("continuous", 1), 4, max_num_seqs=2)
    save_run(run, tmp_path / "fork.json")
    again = load_run(tmp_path / "fork.json")
    assert again == run
    assert first_difference(forked(again, 9, max_num_seqs=1), forked(run, 9, max_num_seqs=1)) is None


def test_the_form_starts_from_the_values_of_the_run() -> None:
    values = settings(run_of("speculation", 1).info)
    assert set(values) == {option.name for option in OPTIONS}
    assert (values["drafts"], values["block_size"], values["num_blocks"], values["static"]) == (
        3,
        4,
        25,
        False,
    )
    defaults = EngineArgs()
    assert values["max_num_seqs"] == defaults.max_num_seqs


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Choose an option"),
        ({"seed": 3}, "'seed' is none of the options"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of at least 1"),
        ({"max_num_seqs": "4"}, "max_num_seqs must be a whole number of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs must be a whole number of at least 1"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be fcfs or priority"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be true or false"),
        ({"enable_chunked_prefill": False}, "Without chunked prefill a prompt must fit into one step"),
        ({"num_blocks": 2}, "Request 'ann'"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused_with_a_sentence(
    changes: dict[str, Any], sentence: str
) -> None:
    run = run_of("continuous", 1)
    with pytest.raises(ValueError, match=sentence):
        forked(run, 3, **changes)


def test_a_run_without_its_requests_cannot_be_forked() -> None:
    run = replace(run_of("copy"), workload=None)
    with pytest.raises(ValueError, match="This run came without its requests"):
        forked(run, 3, max_num_seqs=2)
    assert make_page([run])["runs"][0]["settings"] is None


def test_the_page_says_what_was_changed_and_where_the_runs_part() -> None:
    run, changes = run_of("priority"), {"scheduling_policy": "priority"}
    page = make_page([run, forked(run, 3, **changes)], fork_lesson(run, 3, changes))
    assert page["title"]["en"] == "What if scheduling_policy = priority, from step 3 on?"
    assert page["start"] == page["runs"][1]["forked_at"] == 3
    (comparison,) = page["comparisons"]
    assert comparison["say"]["en"] == (
        "“as it was” and “what if” part in step 3: admission ends for a different reason. “as it was” says: dan waits: "
        "max_num_seqs is 3. “what if” says: urgent waits: max_num_seqs is 3."
    )
    changes = {"block_size": 8}
    page = make_page([run, forked(run, 3, **changes)], fork_lesson(run, 3, changes))
    assert page["lesson"]["en"].startswith("block_size cannot change in mid-run")
    assert page["sides"][1]["en"] == "block_size = 8: 6 blocks, the same memory"
    assert "A block holds 4 tokens in “as it was” and 8 in “what if”." in page["comparisons"][0]["say"]["en"]
