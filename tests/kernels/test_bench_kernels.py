"""Every rung improves the figure that its card claims, and `twinfer bench kernels` prints and saves the figures."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fast import kernels
from fast.bench.kernel_cases import CASES, SMALL, useful_bytes
from fast.bench.kernels import COUNTS, count_rungs, improvements, time_cpu
from fast.bench.results import print_table
from fast.kernel_trace import KernelCounts
from reference.frontend.cli import main

LADDER = kernels.ladder("simt")


def test_every_ladder_has_a_case_and_every_rung_but_the_first_a_claim() -> None:
    assert set(CASES) == set(LADDER.rungs) == set(LADDER.claims)
    for operation, (first, *others) in LADDER.claims.items():
        assert first == ""
        assert set(others) <= set(COUNTS), operation
        assert len(others) + 1 == len(LADDER.rungs[operation])
    assert set(COUNTS) <= {each.name for each in fields(KernelCounts)} | {
        "shuffles",
        "tensor_core_operations",
    }


@pytest.mark.parametrize("operation", CASES)
def test_every_rung_improves_what_its_card_claims(operation: str) -> None:
    rows = list(count_rungs(CASES[operation]))
    assert [row["rung"] for row in rows] == list(LADDER.rungs[operation])
    compared = list(improvements(rows))
    assert len(compared) == len(rows) - 1
    for before, row in compared:
        assert row[row["claim"]] < before[row["claim"]], f"{row['rung']}: {row['claim']}"


@pytest.mark.parametrize("operation", CASES)
def test_no_rung_reads_or_writes_memory_that_no_argument_names(operation: str) -> None:
    case = CASES[operation]
    for rung in LADDER.rungs[operation]:
        trace = kernels.trace_kernel(
            LADDER, case.method, **case.make(SMALL, case.dtype), rung=rung, block=(9, 9, 9)
        )
        assert trace.counts.unnamed == 0, rung
        # All that has to be moved is moved at least once.
        assert 32 * trace.counts.sectors >= useful_bytes(case.make(SMALL, case.dtype)) * 0.9


def test_tensor_core_rungs_multiply_there_and_have_no_conflict_in_the_tiles() -> None:
    decode, prefill = (list(count_rungs(CASES[name])) for name in ("paged_attention", "prefill_attention"))
    assert [row["rung"] for row in decode + prefill if row["tensor_core_operations"]] == [
        "v6_tensor_cores",
        "v3_tensor_cores",
    ]
    assert [row["bank_conflicts"] for row in prefill] == [0, 0, 0]


def test_rungs_that_do_not_take_a_type_are_left_out() -> None:
    rows = list(count_rungs(CASES["paged_attention"], torch.float32))
    assert [row["rung"] for row in rows] == list(LADDER.rungs["paged_attention"][:5])


def test_the_command_prints_a_ladder_and_saves_what_it_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "kernels", "--operation", "cache_write", "rms_norm"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "rms_norm" in printed
    assert "25%" in printed  # of the instructions, with 128-bit loads of float32
    assert main([*command, "--json", "--save", str(tmp_path / "k")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "k.json").read_text())
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")
    assert [row["operation"] for row in document["rungs"]] == ["cache_write"] * 2 + ["rms_norm"] * 4


@pytest.mark.parametrize("terminal", [True, False])
def test_a_wide_table_breaks_between_words_on_a_narrow_terminal_and_not_at_all_in_a_file(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console = partial(Console, force_terminal=terminal, width=60, color_system=None)
    monkeypatch.setattr("fast.bench.results.Console", console)
    headings = ["float16", *(f"v{i} vectorised" for i in range(5))]
    print_table("ladder", headings, [["global instructions", "12,147,200", "3,672 17%", "1", "2", "3"]])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 5 * 11 + 12 if terminal else any("global instructions" in x for x in lines)
    assert "…" not in "".join(lines)
    for word in ("12,147,200", "17%", "vectorised", "instructions"):
        assert any(word in line for line in lines), word


def test_times_of_the_cpu_are_those_of_one_kernel_and_bytes_of_its_tensors() -> None:
    (row,) = time_cpu(CASES["gelu"], 1)
    assert row["median_us"] == row["fastest_us"] > 0
    moved = 2 * 256 * 4096 * 4  # x and out in float32
    assert row["gb_per_s"] == pytest.approx(moved / row["median_us"] / 1e3)
    assert list(time_cpu(CASES["argmax"], 1)) == []  # csrc/cpu has none


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--operation", "divide"], "--operation divide is unknown; there are rms_norm,"),
        (["--repeat", "0"], "--repeat must be at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_sentence(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(kernels.why_no_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_times_of_the_gpu_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cuda"]) == 2
    assert "device 'cuda' cannot be used here." in capsys.readouterr().err
