"""What the pages are made with: code cut out of C++ by name, charts, counted accesses, and the planted bugs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from docs.support.bits import compare
from docs.support.cases import CASES, show
from docs.support.charts import Cell, bar_chart, cell_grid, line_chart
from docs.support.kernel_counts import decode
from docs.support.native import Counts, Recorded, cpp_comment, cpp_source, recorded
from docs.support.runs import run_static
from docs.support.serving import generations
from tests.mutants import MUTANTS


def test_a_kernel_is_cut_out_with_its_template_and_its_comment_and_ends_where_it_ends() -> None:
    shown = cpp_source("csrc/kernels/reduce.cuh", "warp_reduce")
    assert "// Butterfly over the lanes of a warp" in shown
    assert "template <class Op, int kWidth = kWarpSize>" in shown
    assert shown.rstrip().endswith("}\n```")
    assert "block_reduce_shuffle" not in shown
    assert "combine(float a" not in cpp_source("docs/programs/reductions.cu", "every_256th")


@pytest.mark.parametrize(("name", "count"), [("warp_sum", 0), ("combine", 0)])
def test_a_name_that_a_file_does_not_define_at_its_top_is_an_error(name: str, count: int) -> None:
    with pytest.raises(LookupError, match=rf"reduce\.cuh has {count} definitions called {name}"):
        cpp_source("csrc/kernels/reduce.cuh", name)
    with pytest.raises(LookupError, match="has no line that begins with '// No such"):
        cpp_comment("csrc/kernels/reduce.cuh", "// No such")


def test_charts_say_in_words_what_they_draw() -> None:
    bars = bar_chart([("one", 3.0), ("two", 1500.0)], "Things", unit="ms")
    assert 'aria-label="Things: one 3, two 1,500"' in bars
    assert "1,500 ms" in bars
    lines = line_chart({"a": [(1, 2), (8, 4)]}, "Growth", "x", "y", log_x=True)
    assert "a: 1 gives 2, 8 gives 4" in lines
    assert lines.count("<circle") == 2
    grid = cell_grid({"row": [Cell("7", "tw-free", "the <seventh>"), None]}, "Cells")
    assert grid.count("<rect") == 1
    assert "the &lt;seventh&gt;" in grid


def test_passes_over_the_banks_are_counted_and_the_lanes_of_an_atomic_take_turns() -> None:
    read = Counts("read", "shared", "total", 4, 8, 256, 0, 8)  # a broadcast to each of eight warps
    assert read.passes == 8
    assert replace(read, did="atomic").passes == 256
    both = Recorded([read, replace(read, did="atomic")], [], 0, 0, "")
    assert both.total("passes", space="shared") == 264
    assert both.total("passes", did="read") == 8


def test_accesses_are_recorded_lane_by_lane_without_a_change_to_the_kernel() -> None:
    result = recorded("first_steps", "transpose", "0")
    assert all(len(access.offsets) == 32 for access in result.accesses)
    writes, reads = ([a for a in result.accesses if a.did == did] for did in ("write", "read"))
    assert len(writes) == len(reads) == 32
    assert {access.wavefronts for access in writes} == {1}
    assert {access.wavefronts for access in reads} == {32}
    assert (result.total("passes", did="write"), result.total("passes", did="read")) == (32, 1024)


def test_the_operations_of_warps_are_counted_by_name() -> None:
    result = recorded("reductions", "shuffle")
    assert (result.barriers, result.shuffles) == (2, 5 * 8)
    assert recorded("reductions", "halving_tree").shuffles == 0


def test_a_rung_that_shares_its_loads_brings_each_key_and_value_once() -> None:
    alone, shared = (decode(rung, 1, 4, 1, 40) for rung in ("v4_split_kv", "v5_grouped"))
    assert (alone.times_the_least, shared.times_the_least) == (4, 1)
    assert (alone.blocks, shared.blocks) == (4, 1)
    first = shared.first_load("k_cache")
    assert (len(first.lanes), first.width) == (32, 16)
    assert {position for _, position in first.tokens} == {0, 1}


def test_a_static_batch_lets_nobody_in_before_its_last_request_has_ended() -> None:
    traces = run_static(("a", 4, 2), ("b", 4, 9), ("c", 4, 2), batch_size=2)
    together = [set(trace.num_scheduled_tokens) for trace in traces]
    assert not any("c" in names and len(names) > 1 for names in together)
    assert len(traces) == 9 + 2


def test_the_three_servers_compute_the_same_tokens_and_hold_no_more_than_their_memory() -> None:
    computed = set()
    for served in generations():
        computed.add(sum(trace.budget_used for trace in served.traces))
        assert len(served.latencies()) == 48
        assert 0 < served.share_used <= 1
    assert len(computed) == 1


def test_bits_that_differ_are_counted() -> None:
    import numpy as np

    one = np.zeros((1, 4), np.float32)
    other = one.copy()
    other[0, 1] = 1e-7
    assert compare(one, one)[0] == "yes"
    assert compare(one, other)[:2] == ("no", "25%")


def test_there_are_twenty_cases_of_twenty_bugs() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 20
    assert {case.name for case in CASES} <= set(MUTANTS)


def test_a_case_shows_the_bug_first_and_folds_the_answer_away() -> None:
    names = [case.name for case in CASES]
    shown = show(1 + names.index("lone_request_held_up"))
    open_part, _, answer = shown.partition("??? success")
    assert "| 0 | 4 | 4 |" in open_part  # a step of four tokens, where fourteen were possible
    assert "lone_request_held_up" not in open_part
    assert "| 0 | 14 | 14 |" in answer
    assert re.search(r"^    ```python title=\"tests/mutants/scheduling\.py", answer, re.MULTILINE)


def test_a_bug_that_its_exhibit_does_not_show_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from docs.support import cases

    blind = cases.Case("lone_request_held_up", "", lambda: "always the same")
    monkeypatch.setattr(cases, "CASES", (blind,))
    with pytest.raises(AssertionError, match="cannot be seen in its exhibit"):
        cases.show(1)
