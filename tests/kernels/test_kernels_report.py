"""The report of `make kernels-report`: what it says of a kernel, and when it fails."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools import kernels_report
from tools.kernel_budgets import Budget, Budgets
from tools.kernel_facts import Kernel

TUNED = Kernel("v3", ("float32", "64"), "sm_80", 56, 0, 0, 1040, 128, Counter({"SHFL.BFLY": 5, "LDS.128": 2}))
GENERIC = replace(TUNED, arguments=("float32", "0"), registers=200)
BUDGETS = Budgets(
    ("SHFL",), ("0",), 4096, {"v3": Budget(registers=56, shared=1040, sass={"SHFL": 5}, dynamic=4)}
)


def test_a_line_has_the_resources_the_occupancy_and_the_instructions_of_a_kernel() -> None:
    (line,) = kernels_report.lines_of((TUNED,), BUDGETS)
    # 1,040 + 4 * 4,096 bytes and 1 KiB more: 9 blocks in 164 KiB; 56 registers: 9 warps in each of four quarters.
    assert line.to_json() == {
        "kernel": "v3",
        "arguments": ["float32", "64"],
        "architecture": "sm_80",
        "threads": 128,
        "registers": 56,
        "shared_bytes": 1040,
        "dynamic_shared_bytes": 16384,
        "local_bytes": 0,
        "spilled_bytes": 0,
        "resident_blocks": 9,
        "occupancy": 36 / 64,
        "limited_by": ["registers", "shared memory"],
        "sass": {"SHFL": 5, "LDS": 2, "STS": 0, "LDL": 0, "STL": 0},
    }


def test_the_table_and_the_page_have_every_kernel_and_one_row_for_types_that_agree(tmp_path: Path) -> None:
    half = replace(TUNED, arguments=("float16", "64"))
    lines = kernels_report.lines_of((half, TUNED, GENERIC), BUDGETS)
    console = Console(width=200, record=True, file=(tmp_path / "unused").open("w"))
    console.print(kernels_report.table_of("sm_80", lines))
    printed = [line.split() for line in console.export_text().splitlines()]
    kernels_report.write_files(tmp_path, {"sm_80": lines}, BUDGETS)
    page = (tmp_path / "kernels-report.md").read_text()
    # 9 and 2 blocks of 4 warps, of at most 64 warps.
    tuned = "128 56 1040 + 16384 - - 9 56% registers, shared memory 5 2 - - -"
    generic = "128 200 1040 + 16384 - - 2 12% registers 5 2 - - -"
    for title, cells in (("v3<float16 | float32, 64>", tuned), ("v3<float32, 0>", generic)):
        assert f"{title} {cells}".split() in printed
        assert title.replace("|", "\\|") in page
    assert len(printed) == 4  # with a title and the names of the columns
    saved = json.loads((tmp_path / "kernels-report.json").read_text())
    assert saved["kernels"] == [line.to_json() for line in lines]


def test_a_kernel_over_its_budget_or_without_one_is_a_breach_unless_it_is_for_any_head_dim() -> None:
    def sentences(*kernels: Kernel) -> list[str]:
        return kernels_report.broken_budgets(kernels_report.lines_of(kernels, BUDGETS), BUDGETS)

    assert sentences(TUNED, GENERIC) == []
    assert sentences(replace(TUNED, registers=64)) == [
        "v3<float32, 64> on sm_80: 64 registers, at most 56 are allowed"
    ]
    assert sentences(replace(TUNED, name="v9")) == ["v9 has no row in tests/kernels/budgets.toml"]


def test_a_kernel_that_does_not_state_its_block_size_is_reported_for_the_largest() -> None:
    (line,) = kernels_report.lines_of((replace(TUNED, threads=0, registers=64),), BUDGETS)
    assert (line.resident.blocks, line.resident.share) == (1, 0.5)
