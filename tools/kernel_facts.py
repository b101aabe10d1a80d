"""What the compiler made of each CUDA kernel: registers, local and shared memory, block size, instructions.

Nothing runs: the launchers of csrc/cuda are compiled, and what `ptxas -v` says, the PTX and the machine code (SASS)
are read. Used by tests/kernels/test_nvcc.py and tools/kernels_report.py.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.cuda_toolkit import ROOT, Toolkit

FLAGS = ("-std=c++17", "-lineinfo", "-I", "csrc", "-Xptxas", "-v,-warn-spills,-warn-lmem-usage")
TYPE_NAMES = {"float": "float32", "__half": "float16", "__nv_bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Kernel:
    """One kernel as compiled for one architecture.

    Attributes:
        name: the function's name.
        arguments: its template arguments, types by the names that torch has for them.
        architecture: as in `sm_80`.
        registers: a thread.
        stack_bytes: local memory a thread, with what is spilled.
        spill_bytes: stored to local memory for want of registers.
        shared_bytes: static shared memory a block; the dynamic part is known at the launch only.
        threads: of the largest block that it may be launched with (`__launch_bounds__`); 0 when it does not say.
        instructions: opcode with its modifiers, as in `LDG.E.128` -> how often it stands in the code.
    """

    name: str
    arguments: tuple[str, ...]
    architecture: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    instructions: Counter[str]

    @property
    def title(self) -> str:
        return f"{self.name}<{', '.join(self.arguments)}>" if self.arguments else self.name

    def count(self, pattern: str) -> int:
        """How many instructions have the pattern's opcode and all of its modifiers, in any order among others."""
        opcode, *modifiers = pattern.split(".")
        total = 0
        for instruction, times in self.instructions.items():
            first, *others = instruction.split(".")
            if first == opcode and set(modifiers) <= set(others):
                total += times
        return total


@dataclass(frozen=True)
class Compiled:
    """All kernels of some launchers, and every line of the compiler that is a warning."""

    kernels: tuple[Kernel, ...]
    warnings: tuple[str, ...]


class CompileError(RuntimeError):
    """nvcc refused a file; the message is what it said."""


def launchers() -> list[Path]:
    """The files that instantiate kernels, the largest first: it decides how long a parallel build takes."""
    return sorted((ROOT / "csrc" / "cuda").glob("*.cu"), key=lambda path: -path.stat().st_size)


def compile_kernels(toolkit: Toolkit, architecture: str, folder: Path, workers: int = 2) -> Compiled:
    """Compiles every launcher for one architecture, several files at a time. Raises CompileError."""

    def one(source: Path) -> Compiled:
        return compile_launcher(toolkit, source, architecture, folder)

    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(one, launchers()))
    kernels = sorted((k for part in parts for k in part.kernels), key=lambda k: (k.name, k.arguments))
    return Compiled(tuple(kernels), tuple(line for part in parts for line in part.warnings))


def compile_launcher(toolkit: Toolkit, source: Path, architecture: str, folder: Path) -> Compiled:
    """Host and device code of one file, as `fast` would be built; the object file goes to `folder`."""
    number = architecture.removeprefix("sm_")
    target = folder / f"{source.stem}-{architecture}.o"
    code = f"arch=compute_{number},code=[{architecture},compute_{number}]"  # machine code, and the PTX it came from
    command = [toolkit.nvcc, *FLAGS, "-gencode", code, "-c", source, "-o", target]
    result = call(toolkit, command)
    if result.returncode != 0:
        raise CompileError(f"{source.name} for {architecture}:\n{result.stderr}")
    ptx = call(toolkit, [toolkit.cuobjdump, "-ptx", target]).stdout
    sass = call(toolkit, [toolkit.cuobjdump, "-sass", target]).stdout
    kernels = kernels_of(result.stderr, ptx, sass, architecture)
    warnings = [line for line in demangle(result.stderr).splitlines() if "warning" in line.lower()]
    return Compiled(tuple(kernels), tuple(warnings))


def call(toolkit: Toolkit, command: Iterable[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=toolkit.environment(),
    )


def kernels_of(report: str, ptx: str, sass: str, architecture: str) -> list[Kernel]:
    """Joins the three texts about one object file. Raises CompileError where one misses a kernel of another."""
    resources, threads, instructions = parse_report(report), parse_threads(ptx), parse_sass(sass)
    if not resources.keys() == threads.keys() == instructions.keys():
        odd = (resources.keys() | threads.keys() | instructions.keys()) - (
            resources.keys() & threads.keys() & instructions.keys()
        )
        raise CompileError(f"ptxas, PTX and SASS do not list the same kernels: {', '.join(sorted(odd))}")
    declarations = demangle("\n".join(resources)).splitlines()
    return [
        Kernel(*split_name(declaration), architecture, *facts, threads[symbol], instructions[symbol])
        for declaration, (symbol, facts) in zip(declarations, resources.items(), strict=True)
    ]


def parse_report(report: str) -> dict[str, tuple[int, int, int, int]]:
    """Symbol -> registers, bytes of stack frame, of spill stores, of static shared memory; from `ptxas -v`."""
    entry = re.compile(
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, \d+ bytes spill loads\n"
        r".*?Used (\d+) registers(.*)"
    )
    found = {}
    for symbol, stack, spilled, registers, rest in entry.findall(report):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[symbol] = (int(registers), int(stack), int(spilled), int(shared.group(1)) if shared else 0)
    return found


def parse_threads(ptx: str) -> dict[str, int]:
    """Symbol -> threads of the largest block, 0 where the kernel has no `__launch_bounds__`."""
    found = {}
    for symbol, directives in re.findall(r"\.entry (\w+)\([^)]*\)([^{]*)\{", ptx):
        bound = re.search(r"\.maxntid (\d+)(?:, (\d+))?(?:, (\d+))?", directives)
        x, y, z = (int(side or 1) for side in bound.groups()) if bound else (0, 0, 0)
        found[symbol] = x * y * z
    return found


def parse_sass(sass: str) -> dict[str, Counter[str]]:
    """Symbol -> instruction -> how often it stands there. Padding behind the last instruction is not counted."""
    found: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for line in sass.splitlines():
        if start := re.search(r"Function : (\S+)", line):
            counts = found.setdefault(start.group(1), Counter())
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", line):
            counts[instruction.group(1)] += 1
        counts.pop("NOP", None)
    return found


def demangle(text: str) -> str:
    """Replaces C++ symbols in a text by what they stand for. c++filt comes with the compiler."""
    return subprocess.run(["c++filt"], check=True, input=text, capture_output=True, text=True).stdout.rstrip(
        "\n"
    )


def split_name(declaration: str) -> tuple[str, tuple[str, ...]]:
    """`void twinfer::device::gelu_v1_element<__half>(...)` -> `gelu_v1_element`, (`float16`,)."""
    match = re.match(r"(?:.*?[ :])?(\w+)(?:<(.*?)>)?\(", declaration)
    if match is None:
        raise CompileError(f"no kernel's name: {declaration}")
    name, arguments = match.groups()
    words = [word.strip() for word in arguments.split(",")] if arguments else []
    return name, tuple(TYPE_NAMES.get(word, word) for word in words)
