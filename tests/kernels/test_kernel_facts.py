"""How the compiler's reports are read, and what counts as a breach of a kernel's budget."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tools import kernel_facts
from tools.kernel_budgets import Budget, Budgets, breaches, load_budgets, row_for
from tools.kernel_facts import CompileError, Kernel

# Of nvcc 13.0, shortened.
REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4softIfEvT_' for 'sm_80'
ptxas info    : Function properties for _Z4softIfEvT_
    256 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 256 bytes cumulative stack size, 488 bytes cmem[0]
ptxas info    : Compile time = 24.3 ms
ptxas info    : Compiling entry function '_Z4hardI6__halfLi64EEvT_' for 'sm_80'
ptxas info    : Function properties for _Z4hardI6__halfLi64EEvT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 77 registers, used 1 barriers, 8208 bytes smem, 488 bytes cmem[0]
"""
PTX = """\
.visible .entry _Z4softIfEvT_(
	.param .align 8 .b8 _Z4softIfEvT__param_0[64]
)
{
	ret;
}
.visible .entry _Z4hardI6__halfLi64EEvT_(
	.param .align 8 .b8 _Z4hardI6__halfLi64EEvT__param_0[64]
)
.maxntid 32, 4, 1
.minnctapersm 6
{
	ret;
}
"""
SASS = """\
		Function : _Z4softIfEvT_
	.headerflags	@"EF_CUDA_SM80 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM80)"
        /*0000*/                   LDG.E.128.CONSTANT R4, [R2.64] ;             /* 0x00000a00ff017624 */
                                                                                /* 0x000fe400078e00ff */
        /*0010*/              @!P0 LDG.E R5, [R2.64] ;                          /* 0x0000000000007919 */
        /*0020*/              @UP1 UMOV UR4, URZ ;                              /* 0x0000000000007919 */
		Function : _Z4hardI6__halfLi64EEvT_
        /*0000*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;                /* 0x0000000000007b1d */
        /*0010*/                   NOP ;                                        /* 0x0000000000007918 */
        /*10010*/                  HMMA.16816.F32.BF16 R4, R8, R12, R4 ;        /* 0x0000000000007918 */
"""
KERNEL = Kernel(
    "hard",
    ("float16", "64"),
    "sm_80",
    77,
    0,
    0,
    8208,
    128,
    Counter({"BAR.SYNC.DEFER_BLOCKING": 2, "LDG.E": 3}),
)
BUDGET = Budget(registers=80, shared=8208, sass={"BAR.SYNC": 2, "LDG.E.128": 0, "LDG": ">=2"})


def test_three_reports_become_one_record_a_kernel() -> None:
    soft, hard = kernel_facts.kernels_of(REPORT, PTX, SASS, "sm_80")
    assert soft == Kernel(
        "soft", ("float32",), "sm_80", 40, 256, 12, 0, 0,
        Counter({"LDG.E.128.CONSTANT": 1, "LDG.E": 1, "UMOV": 1}),
    )  # fmt: skip
    assert hard == Kernel(
        "hard", ("float16", "64"), "sm_80", 77, 0, 0, 8208, 128,
        Counter({"BAR.SYNC.DEFER_BLOCKING": 1, "HMMA.16816.F32.BF16": 1}),
    )  # fmt: skip
    assert (soft.title, hard.title) == ("soft<float32>", "hard<float16, 64>")


def test_reports_that_list_different_kernels_are_refused() -> None:
    with pytest.raises(CompileError, match=r"do not list the same kernels: _Z4hardI6__halfLi64EEvT_"):
        kernel_facts.kernels_of(REPORT, PTX, SASS[: SASS.index("\t\tFunction : _Z4hard")], "sm_80")


@pytest.mark.parametrize(
    ("pattern", "times"), [("LDG", 7), ("LDG.E.128", 4), ("LDG.128.E", 4), ("LDG.E.64", 0), ("BAR", 0)]
)
def test_a_pattern_matches_every_instruction_that_has_its_modifiers(pattern: str, times: int) -> None:
    counts = Counter({"LDG.E.128": 1, "LDG.E.128.CONSTANT": 3, "LDG.E": 2, "LDG.E.U16": 1, "LDGSTS.E.128": 5})
    assert replace(KERNEL, instructions=counts).count(pattern) == times


def test_a_kernel_without_template_arguments_has_a_name_too() -> None:
    assert kernel_facts.split_name("twinfer::device::philox(twinfer::device::Args)") == ("philox", ())
    assert kernel_facts.split_name("void a::b::gelu<__half, true>(a::Args<__half>)") == (
        "gelu",
        ("float16", "true"),
    )


def test_a_kernel_within_its_budget_breaks_nothing() -> None:
    assert breaches(KERNEL, BUDGET) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"registers": 81}, "81 registers, at most 80 are allowed"),
        ({"shared_bytes": 8209}, "8209 bytes of shared memory, at most 8208 are allowed"),
        ({"stack_bytes": 8}, "8 bytes of local memory, at most 0 are allowed"),
        ({"spill_bytes": 4}, "4 bytes spilled, at most 0 are allowed"),
        ({"threads": 0}, "no __launch_bounds__"),
        ({"instructions": Counter({"BAR.SYNC": 1, "LDG": 2})}, "1 BAR.SYNC, 2 expected"),
        ({"instructions": Counter({"BAR.SYNC": 2, "LDG": 1})}, "1 LDG, >=2 expected"),
        ({"instructions": Counter({"BAR.SYNC": 2, "LDG": 1, "LDG.E.128": 1})}, "1 LDG.E.128, 0 expected"),
        ({"instructions": Counter({"BAR.SYNC": 2, "LDG": 2, "STL.64": 3})}, "3 STL, which use local memory"),
    ],
)
def test_each_breach_is_one_sentence_that_names_the_kernel(change: dict, sentence: str) -> None:
    (found,) = breaches(replace(KERNEL, **change), BUDGET)
    assert found.startswith("hard<float16, 64> on sm_80: ")
    assert sentence in found


def test_local_memory_is_allowed_where_the_row_says_so_and_only_as_much() -> None:
    budget = replace(BUDGET, local=256)
    kernel = replace(KERNEL, instructions=KERNEL.instructions + Counter({"LDL": 9}))
    assert breaches(replace(kernel, stack_bytes=256), budget) == []
    assert len(breaches(replace(kernel, stack_bytes=264), budget)) == 1


def test_what_a_row_does_not_name_must_not_be_there(tmp_path: Path) -> None:
    table = tmp_path / "budgets.toml"
    table.write_text(
        'counted = ["SHFL", "HMMA"]\ngeneric = ["0"]\ncontext = 100\n'
        "[kernels]\nhard = { registers = 80, shared = 0, dynamic = 4, sass = { SHFL = 5 } }\n"
    )
    budgets = load_budgets(table)
    assert budgets.kernels["hard"].sass == {"SHFL": 5, "HMMA": 0}
    assert budgets.dynamic_bytes(KERNEL) == 400
    assert budgets.holds(KERNEL)
    assert not budgets.holds(replace(KERNEL, arguments=("float16", "0")))


def test_a_suggested_row_holds_for_the_kernels_that_it_was_made_from(tmp_path: Path) -> None:
    other = replace(KERNEL, registers=41, instructions=Counter({"BAR.SYNC": 2, "SHFL": 5}))
    row = row_for([KERNEL, other], ["BAR.SYNC", "SHFL"])
    assert row == 'hard = { registers = 80, shared = 8208, sass = { "BAR.SYNC" = 2, "SHFL" = ">=0" } }'
    table = tmp_path / "budgets.toml"
    table.write_text(f'counted = ["BAR.SYNC", "SHFL"]\ngeneric = []\ncontext = 1\n[kernels]\n{row}\n')
    budgets: Budgets = load_budgets(table)
    assert [breaches(kernel, budgets.kernels["hard"]) for kernel in (KERNEL, other)] == [[], []]
