"""The parent's side of the protocol (`children/child.py`): a child that hangs, dies or fails is one sentence."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

CHILDREN = Path(__file__).parent / "children"


class PeerError(ValueError):
    """An engine cannot be compared; the message is one sentence that says why."""


class PeerProcess:
    """One engine in its own process.

    Args:
        command: how to start it.
        log: where what it prints goes.
        environment: variables to set besides those of this process.
        timeout: seconds that one answer may take.

    Attributes:
        started: when it was started, by `time.perf_counter`.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        timeout: float = 900.0,
    ) -> None:
        self.timeout = timeout
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.perf_counter()
        with log.open("w", encoding="utf-8") as errors:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,  # so that it can be ended with the processes that it started
                )
            except OSError as error:
                raise PeerError(f"it cannot be started ({error.strerror})") from error
        self._received = b""
        self._patience = 30.0  # seconds it may take to end

    def load(self, model: Path, threads: int) -> dict[str, Any]:
        """Load the model. Returns how the engine was set up, and the versions of its packages."""
        return self._ask({"op": "load", "model": str(model), "threads": threads})

    def run(self, requests: Iterable[tuple[Sequence[int], int]]) -> float:
        """Seconds for these requests. Raises PeerError: it failed, or did not generate what was asked for."""
        asked = [(list(ids), count) for ids, count in requests]
        answer = self._ask({"op": "run", "requests": asked})
        wanted: list[int] = [count for _, count in asked]
        got: list[int] = answer["generated"]
        if got != wanted:
            raise PeerError(f"it generated {sum(got)} tokens where {sum(wanted)} were asked for")
        return float(answer["seconds"])

    def peak_memory(self) -> int | None:
        """Most bytes that it and its children had in memory, added up; None where the system does not tell."""
        total = sum(map(_peak_of, _descendants(self._process.pid)))
        return total or None

    def cpu_seconds(self) -> float:
        """Seconds of processor time that it and its children have used; 0 where the system does not tell."""
        return sum(map(_cpu_seconds_of, _descendants(self._process.pid)))

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(self._how_it_ended()) from error
        answer: dict[str, Any] = json.loads(self._read_line())
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + self.timeout
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._patience = 0.0
                raise PeerError(f"it gave no answer within {self.timeout:.0f} s")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise PeerError(self._how_it_ended())
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return f"it stopped answering; its output is in {self.log}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()[:200]}" if lines else ""
        return f"it ended with status {status}{last}"

    def close(self) -> None:
        """End the process and those that it started, gently if it listens."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.write(b'{"op": "quit"}\n')
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=self._patience)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8")
        except OSError:
            continue
        found += [int(child) for child in children.split()]
    return found


def _peak_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    peak = next((line for line in lines if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(peak.split()[1]) * 1024


def _cpu_seconds_of(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]  # the name, in parentheses, may contain anything
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
