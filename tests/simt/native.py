"""Builds the C++ programs of the emulator's tests, each in the ways in which bugs are looked for."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "simt"
LAUNCHERS = {
    "primitives": [],
    "traced": [],
    "planted_bugs": ["attention.cu"],
    "real_kernels": ["attention.cu", "cache.cu", "layers.cu", "prefill.cu", "sampling.cu", "ladders.cpp"],
}
EMULATOR = [f"csrc/simt/{name}.cpp" for name in ("fiber", "machine", "trace", "warp")]
FLAGS = [
    "-std=c++17",
    "-g",
    "-fno-strict-aliasing",
    "-Wno-unknown-pragmas",
    f"-fmacro-prefix-map={ROOT}/=",
    "-I",
]
FLAGS += [str(ROOT / "csrc"), "-pthread"]


@dataclass(frozen=True)
class Build:
    """How a program is compiled.

    Attributes:
        kernels: flags for the kernels and the program.
        emulator: flags for csrc/simt, which ThreadSanitizer must not see.
        link: flags for the linker.
        extra: more sources of the emulator.
    """

    kernels: tuple[str, ...]
    emulator: tuple[str, ...]
    link: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


ASAN = ("-fsanitize=address,alignment,bounds", "-fno-omit-frame-pointer", "-O1")
BUILDS = {
    "plain": Build(("-O1",), ("-O1",)),
    "ucontext": Build(("-O1", "-DTWINFER_SIMT_UCONTEXT"), ("-O1", "-DTWINFER_SIMT_UCONTEXT")),
    "asan": Build(ASAN, ASAN, ("-fsanitize=address,alignment,bounds",)),
    # As in fast._simt_trace: ThreadSanitizer's calls, answered by the trace.
    "trace": Build(
        ("-fsanitize=thread", "-O1", "-fno-tree-sra"), ("-O1",), extra=("csrc/simt/access_hooks.cpp",)
    ),
    "tsan": Build(("-fsanitize=thread", "-O1"), ("-O1", "-DTWINFER_SIMT_TSAN"), ("-fsanitize=thread",)),
}


@dataclass(frozen=True)
class Result:
    status: int
    text: str

    def names(self, file: str, lines: list[int]) -> bool:
        """Whether the text has one of the lines of a file, as `file:line`."""
        return any(re.search(rf"{re.escape(file)}:{line}\b", self.text) for line in lines)


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def call(command: list[str]) -> None:
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"


def build(program: str, how: str, folder: Path) -> Path:
    """Compiles tests/simt/PROGRAM.cu with the emulator and the kernels that it wants; what `folder` has is kept.

    Workers of one run share the folder: the first builds, the others wait.
    """
    with open(folder / f"{how}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        target = folder / f"{program}-{how}"
        if not target.exists():
            compile_and_link(program, how, target)
    return target


def compile_and_link(program: str, how: str, target: Path) -> None:
    flags = BUILDS[how]
    sources = [(f"tests/simt/{program}.cu", flags.kernels)]
    sources += [(f"csrc/cuda/{name}", flags.kernels) for name in LAUNCHERS[program]]
    sources += [(source, flags.emulator) for source in [*EMULATOR, *flags.extra]]
    objects = [target.parent / f"{Path(source).stem}-{how}.o" for source, _ in sources]
    commands = [
        [compiler(), *FLAGS, *extra, "-x", "c++", "-c", source, "-o", str(output)]
        for (source, extra), output in zip(sources, objects, strict=True)
        if not output.exists()
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, commands))
    call([compiler(), *flags.link, "-pthread", *map(str, objects), "-o", str(target)])


@functools.cache
def without_address_randomization() -> tuple[str, ...]:
    """ThreadSanitizer wants its shadow memory where some kernels' randomization puts libraries."""
    setarch = shutil.which("setarch")
    if setarch is None:
        return ()
    probe = subprocess.run([setarch, "-R", "true"], check=False, capture_output=True)
    return (setarch, "-R") if probe.returncode == 0 else ()


def run(program: Path, *words: str) -> Result:
    options = {
        "ASAN_OPTIONS": "detect_leaks=0",  # an abandoned grid's threads never unwind
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=0:exitcode=66",
    }
    prefix = without_address_randomization() if program.name.endswith("-tsan") else ()
    command = [*prefix, str(program), *words]
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | options, timeout=600
    )
    return Result(result.returncode, result.stdout + result.stderr)


def marked_lines(name: str) -> list[int]:
    """The lines of planted_bugs.cu that a report of bug `name` has to name."""
    text = (SOURCES / "planted_bugs.cu").read_text()
    return [number for number, line in enumerate(text.splitlines(), 1) if f"AT({name})" in line]


def all_bugs() -> list[str]:
    """Every name in the program's list of cases."""
    text = (SOURCES / "planted_bugs.cu").read_text()
    table = text[text.index("kCases = {") :]
    return re.findall(r'(?:PLAIN\(|\{")(\w+)', table[: table.index("\n};")])
