"""The same sources under nvcc: what the compiler made of each kernel, against the table in budgets.toml."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.kernels.nvcc import in_one_worker, on_linux, the_toolkit
from tools.kernel_budgets import breaches, load_budgets, row_for
from tools.kernel_facts import Compiled, Kernel, compile_kernels

pytestmark = [on_linux, in_one_worker]
BUDGETS = load_budgets()
TYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compile_kernels(the_toolkit(), "sm_80", tmp_path_factory.mktemp("nvcc"))


@pytest.fixture(scope="module")
def by_name(compiled: Compiled) -> dict[str, list[Kernel]]:
    """Name -> the kernels of that name that are held to a budget."""
    kernels = defaultdict(list)
    for kernel in compiled.kernels:
        if BUDGETS.holds(kernel):
            kernels[kernel.name].append(kernel)
    return kernels


def test_nvcc_warns_of_nothing_but_local_memory_that_is_reported(compiled: Compiled) -> None:
    """For the path for any head dim it is reported only; the other kernels' is held to the budget below."""
    allowed = [k for k in compiled.kernels if not BUDGETS.holds(k) or BUDGETS.kernels[k.name].local]
    names = "|".join({re.escape(k.name) for k in allowed})
    expected = re.compile(
        rf"(Local memory used for|Registers are spilled to local memory in) function .*\b({names})<"
    )
    assert [line for line in compiled.warnings if not expected.search(line)] == []


def test_every_kernel_has_a_budget_and_every_budget_a_kernel(by_name: dict[str, list[Kernel]]) -> None:
    missing = [
        row_for(kernels, BUDGETS.counted) for name, kernels in by_name.items() if name not in BUDGETS.kernels
    ]
    assert not missing, "rows for tests/kernels/budgets.toml, to be checked:\n" + "\n".join(missing)
    assert set(BUDGETS.kernels) == set(by_name)


@pytest.mark.parametrize("name", BUDGETS.kernels)
def test_registers_memory_and_instructions_are_within_the_budget(
    name: str, by_name: dict[str, list[Kernel]]
) -> None:
    assert by_name[name]
    assert [
        sentence for kernel in by_name[name] for sentence in breaches(kernel, BUDGETS.kernels[name])
    ] == []


@pytest.mark.parametrize("name", BUDGETS.kernels)
def test_every_type_and_both_tuned_head_dims_are_compiled(
    name: str, by_name: dict[str, list[Kernel]]
) -> None:
    words = {word for kernel in by_name[name] for word in kernel.arguments}
    tensor_core = BUDGETS.kernels[name].sass["HMMA"] != 0  # these have no float32
    if types := words & set(TYPES):
        assert types == set(TYPES[1:] if tensor_core else TYPES)
    if dims := words & {"64", "128"}:
        assert len(dims) == 2
