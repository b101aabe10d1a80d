"""The budgets of tests/kernels/budgets.toml, and what a compiled kernel breaks of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.kernel_facts import Kernel

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LOCAL_MEMORY = ("LDL", "STL")  # loads and stores


@dataclass(frozen=True)
class Budget:
    """One row of the table; its head explains the columns. `sass` has every counted instruction."""

    registers: int
    shared: int
    sass: Mapping[str, int | str]
    local: int = 0
    dynamic: int = 0


@dataclass(frozen=True)
class Budgets:
    counted: tuple[str, ...]
    generic: tuple[str, ...]
    context: int  # tokens
    kernels: Mapping[str, Budget]

    def holds(self, kernel: Kernel) -> bool:
        """Whether the kernel is held to its budget: not if it is the path for any head dim."""
        return not set(self.generic) & set(kernel.arguments)

    def dynamic_bytes(self, kernel: Kernel) -> int:
        """Dynamic shared memory a block, for `context` tokens."""
        row = self.kernels.get(kernel.name)
        return row.dynamic * self.context if row else 0


def load_budgets(path: Path = ROOT / "tests" / "kernels" / "budgets.toml") -> Budgets:
    """Reads the table. Raises TypeError for a column that there is not."""
    content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    counted = tuple(content["counted"])
    rows = {}
    for name, columns in content["kernels"].items():
        sass = dict.fromkeys(counted, 0) | columns.pop("sass")
        rows[name] = Budget(sass=sass, **columns)
    return Budgets(counted, tuple(content["generic"]), content["context"], rows)


def breaches(kernel: Kernel, budget: Budget) -> list[str]:
    """What is over the budget or not as it says, one sentence each; empty when all is well."""
    limits = [
        ("registers", kernel.registers, budget.registers),
        ("bytes of shared memory", kernel.shared_bytes, budget.shared),
        ("bytes of local memory", kernel.stack_bytes, budget.local),
        ("bytes spilled", kernel.spill_bytes, budget.local),
    ]
    found = [f"{got} {what}, at most {most} are allowed" for what, got, most in limits if got > most]
    if not budget.local:
        touched = {name: kernel.count(name) for name in LOCAL_MEMORY if kernel.count(name)}
        found += [f"{times} {name}, which use local memory" for name, times in touched.items()]
    for name, wanted in budget.sass.items():
        got = kernel.count(name)
        if got != wanted and not (isinstance(wanted, str) and got >= int(wanted.removeprefix(">="))):
            found.append(f"{got} {name}, {wanted} expected")
    if kernel.threads == 0:
        found.append("no __launch_bounds__, so the compiler does not know how many registers it may take")
    return [f"{kernel.title} on {kernel.architecture}: {sentence}" for sentence in found]


def row_for(kernels: Iterable[Kernel], counted: Iterable[str]) -> str:
    """The row that would hold for the kernels of one name as they are, to begin a new row with."""
    kernels = list(kernels)
    columns = [
        f"registers = {max(-(-k.registers // 8) * 8 for k in kernels)}",
        f"shared = {max(k.shared_bytes for k in kernels)}",
    ]
    if local := max(k.stack_bytes for k in kernels):
        columns.append(f"local = {local}")
    sass = []
    for name in counted:
        least, most = min(k.count(name) for k in kernels), max(k.count(name) for k in kernels)
        if most:
            sass.append(f'"{name}" = {least}' if least == most else f'"{name}" = ">={least}"')
    columns.append(f"sass = {{ {', '.join(sass)} }}" if sass else "sass = {}")
    return f"{kernels[0].name} = {{ {', '.join(columns)} }}"
