"""C++ on a page: functions and comments cut out of their files by name, and programs built for the emulator."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from docs.support.source import ROOT

PROGRAMS = ROOT / "docs" / "programs"
_EMULATOR = ("csrc/simt/fiber.cpp", "csrc/simt/machine.cpp", "csrc/simt/warp.cpp")
_FLAGS = ("-std=c++17", "-g", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-pthread", "-Icsrc")
# ThreadSanitizer watches the kernels, not the emulator that runs them; see csrc/simt/sanitizers.h.
_HOW = {
    "plain": ((), (), ()),
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
        if re.search(rf"\b{re.escape(name)}(<[^>]*>)?\s*[({{]|\bstruct {re.escape(name)}\b", line)
        and not line.startswith((" ", "//", "#"))
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
    while not lines[last].startswith("}"):
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
def build(program: str, how: str = "plain") -> Path:
    """Compiles docs/programs/PROGRAM.cu with the emulator, unless build/docs has the result for the same sources.

    Raises:
        RuntimeError: it does not compile; the message is the compiler's.
    """
    compiler = os.environ.get("CXX", "g++")
    kernels, emulator, link = _HOW[how]
    program_source = str((PROGRAMS / f"{program}.cu").relative_to(ROOT))
    sources = [(program_source, kernels), *((source, emulator) for source in _EMULATOR)]
    folder = ROOT / "build" / "docs"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{program}-{how}-{_digest(program)}"
    if target.exists():
        return target
    jobs = []
    for source, extra in sources:
        output = folder / f"{Path(source).stem}-{how}-{os.getpid()}.o"
        jobs.append((output, [compiler, *_FLAGS, *extra, "-x", "c++", "-c", source, "-o", str(output)]))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(_call, [command for _, command in jobs]))
    # Linked under another name and moved: whoever comes meanwhile finds all of it, or nothing.
    linked = target.with_suffix(f".{os.getpid()}")
    _call([compiler, *link, "-pthread", *(str(output) for output, _ in jobs), "-o", str(linked)])
    linked.replace(target)
    for output, _ in jobs:
        output.unlink()
    return target


def run(program: str, *words: str, how: str = "plain") -> subprocess.CompletedProcess[str]:
    """Runs a program of docs/programs; a report of ThreadSanitizer is in `stderr`, and ends it with status 66."""
    target = build(program, how)
    setarch = shutil.which("setarch") if how == "tsan" else None  # its shadow memory wants a fixed place
    command = [*((setarch, "-R") if setarch else ()), str(target), *words]
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=0:exitcode=66"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def _call(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def _digest(program: str) -> str:
    """Of all that the program is made of."""
    files = [PROGRAMS / f"{program}.cu", *sorted((ROOT / "csrc" / "simt").iterdir())]
    files += sorted((ROOT / "csrc" / "kernels").glob("*.cuh"))
    content = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(content).hexdigest()[:12]
