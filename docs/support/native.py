"""C++ on a page: functions and comments cut out of their files by name, and programs built for the emulator."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.support.source import ROOT

PROGRAMS = ROOT / "docs" / "programs"
_EMULATOR = tuple(f"csrc/simt/{name}.cpp" for name in ("fiber", "machine", "trace", "warp"))
_FLAGS = ("-std=c++17", "-g", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-pthread", "-Icsrc")
# What a program wants besides itself and the emulator.
_LAUNCHERS = {"planted_bugs": ("csrc/cuda/attention.cu",)}
# Flags for the kernels, for the emulator and for the linker. "traced" records every access (csrc/simt/trace.h), "tsan"
# has it looked at by ThreadSanitizer, which must not see the emulator: see csrc/simt/sanitizers.h.
_HOW = {
    "plain": ((), (), ()),
    "traced": (("-fsanitize=thread", "-fno-tree-sra"), (), ()),
    "tsan": (("-fsanitize=thread",), ("-DTWINFER_SIMT_TSAN",), ("-fsanitize=thread",)),
}


def cpp_source(path: str, name: str, comment: bool = True) -> str:
    """A fenced block with the function, kernel or struct called `name`, with its template line and its comment.

    Raises:
        LookupError: the file has no such definition, or several, so the page is out of date.
    """
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    heads = [
        number
        for number, line in enumerate(lines)
        if (
            re.search(rf"\b{re.escape(name)}(<[^>]*>)?\s*[({{]|\bstruct {re.escape(name)}\b", line)
            and not line.startswith((" ", "//", "#"))
        )
        or re.match(rf"    {re.escape(name)}\(", line)  # the second line of a long declaration
    ]
    if len(heads) != 1:
        raise LookupError(
            f"{path} has {len(heads)} definitions called {name}, not one; mend the page that shows it"
        )
    first = last = heads[0]
    while first > 0 and lines[first - 1].startswith(("template", "__global__", "__device__", "inline")):
        first -= 1
    while comment and first > 0 and lines[first - 1].startswith("// ") and "----" not in lines[first - 1]:
        first -= 1
    while not (lines[last].startswith("}") or (last == heads[0] and lines[last].endswith("}"))):
        last += 1
    body = "\n".join(lines[first : last + 1])
    return f'```cpp title="{path}, {name} (lines {first + 1} to {last + 1})"\n{body}\n```\n'


def cpp_comment(path: str, start: str) -> str:
    """A fenced block with the comment that has a line beginning with `start`, from that line to its end.

    Raises:
        LookupError: the file has no such line.
    """
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(start)), None)
    if first is None:
        raise LookupError(f"{path} has no line that begins with {start!r}; mend the page that shows it")
    last = first
    while last + 1 < len(lines) and lines[last + 1].startswith("//") and lines[last + 1] != "//":
        last += 1
    body = "\n".join(lines[first : last + 1])
    return f'```cpp title="{path}, lines {first + 1} to {last + 1}"\n{body}\n```\n'


@cache
def build(program: str, how: str = "traced") -> Path:
    """Compiles docs/programs/PROGRAM.cu, or tests/simt/PROGRAM.cu, with the emulator. What build/docs has for the same
    sources is used again.

    Raises:
        RuntimeError: it does not compile; the message is the compiler's.
    """
    kernels, emulator, link = _HOW[how]
    program_source = str(_source_of(program).relative_to(ROOT))
    sources = [(source, kernels) for source in (program_source, *_LAUNCHERS.get(program, ()))]
    sources += [(source, emulator) for source in _EMULATOR]
    if how == "traced":
        sources += [("csrc/simt/access_hooks.cpp", ()), ("docs/programs/traced.cpp", ())]
    folder = ROOT / "build" / "docs"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{program}-{how}-{_digest(program)}"
    with open(folder / f"{program}-{how}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pages are tested side by side: the first builds, the others wait
        if not target.exists():
            _compile(sources, how, target, link)
    return target


def _compile(
    sources: Sequence[tuple[str, tuple[str, ...]]], how: str, target: Path, link: tuple[str, ...]
) -> None:
    compiler, jobs = os.environ.get("CXX", "g++"), []
    for source, extra in sources:
        output = target.parent / f"{target.name}-{Path(source).stem}.o"
        jobs.append((output, [compiler, *_FLAGS, *extra, "-x", "c++", "-c", source, "-o", str(output)]))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_call, [command for _, command in jobs]))
    linked = target.with_suffix(".new")  # moved when it is whole, in case somebody ends this process
    _call([compiler, *link, "-pthread", *(str(output) for output, _ in jobs), "-o", str(linked)])
    linked.replace(target)
    for output, _ in jobs:
        output.unlink()


def run(program: str, *words: str, how: str = "traced") -> subprocess.CompletedProcess[str]:
    """Builds a program and runs it; a report of ThreadSanitizer is in `stderr`, and ends it with status 66."""
    target = build(program, how)
    setarch = shutil.which("setarch") if how == "tsan" else None  # its shadow memory wants a fixed place
    command = [*((setarch, "-R") if setarch else ()), str(target), *words]
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=0:exitcode=66"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@dataclass(frozen=True)
class Counts:
    """All loads, stores or atomics of one width from or to one array: sums over the grid, instructions of warps."""

    did: str
    space: str
    array: str
    width: int
    instructions: int
    lanes: int
    sectors: int
    wavefronts: int

    @property
    def passes(self) -> int:
        """Times that shared memory is asked; lanes that change one word by an atomic take turns."""
        return self.lanes if self.did == "atomic" else self.wavefronts


@dataclass(frozen=True)
class Access:
    """One load, store or atomic of a warp."""

    did: str
    space: str
    array: str
    width: int
    sectors: int
    wavefronts: int
    offsets: Mapping[int, int]  # lane -> bytes from the beginning of the array


@dataclass(frozen=True)
class Recorded:
    """What a program of docs/programs printed of a trace."""

    counts: Sequence[Counts]
    accesses: Sequence[Access]
    barriers: int
    shuffles: int
    text: str

    def total(self, name: str, **wanted: str) -> int:
        """A sum over the counts whose fields are as wanted."""
        chosen = [c for c in self.counts if all(getattr(c, key) == value for key, value in wanted.items())]
        return sum(getattr(c, name) for c in chosen)


def recorded(program: str, *words: str) -> Recorded:
    """Run a program under the trace.

    Raises:
        RuntimeError: it failed; the message is what it wrote.
    """
    done = run(program, *words)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    lines = [line.split() for line in done.stdout.splitlines()]
    counts = [Counts(*line[1:4], *map(int, line[4:])) for line in lines if line[0] == "count"]
    accesses = [
        Access(*line[1:4], *map(int, line[4:7]), dict(_pair(word) for word in line[7:]))
        for line in lines
        if line[0] == "event"
    ]
    barriers = sum(int(line[1]) for line in lines if line[0] == "barriers")
    shuffles = sum(int(line[2]) for line in lines if line[0] == "operation" and line[1].startswith("__shfl"))
    return Recorded(counts, accesses, barriers, shuffles, done.stdout)


def _pair(word: str) -> tuple[int, int]:
    lane, _, offset = word.partition(":")
    return int(lane), int(offset)


def _call(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def _source_of(program: str) -> Path:
    folders = (PROGRAMS, ROOT / "tests" / "simt")
    return next(folder / f"{program}.cu" for folder in folders if (folder / f"{program}.cu").exists())


def _digest(program: str) -> str:
    """Of all that the program is made of."""
    files = [_source_of(program), *sorted(PROGRAMS.glob("traced.*"))]
    files += sorted((ROOT / "csrc" / "simt").iterdir())
    files += [*sorted((ROOT / "csrc" / "kernels").iterdir()), *sorted((ROOT / "csrc" / "cuda").iterdir())]
    content = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(content).hexdigest()[:12]


if __name__ == "__main__":  # python -m docs.support.native PROGRAM WORD...: build and run one by hand
    done = run(*sys.argv[1:])
    print(done.stdout + done.stderr, end="")
    raise SystemExit(done.returncode)
