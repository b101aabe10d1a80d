"""/v1/trace/steps: whoever watches sees what the engine decides, from whichever step on, and holds up nobody."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reference.contracts.protocols import Tier
from reference.contracts.trace import StepTrace
from reference.frontend import step_watcher, trace_file
from reference.frontend.core_messages import StepRecord
from reference.frontend.server.args import ServerArgs
from reference.frontend.server.streaming import SIGN_OF_LIFE, with_signs_of_life
from reference.frontend.step_watcher import MAX_STEPS_BEHIND, StepWatcher
from reference.frontend.trace_file import StepDecoder
from tests.server.processes import Endpoint, ServerProcess, eventually, running, scripted_server

DEV = ServerArgs(access_log=False, enable_dev_endpoints=True, shutdown_timeout=0)
TRACING: dict[str, Any] = {"trace": True}


class Watcher:
    """Reads the stream in a thread and decodes it as a client does."""

    def __init__(self, server: Endpoint) -> None:
        self.head: dict[str, Any] = {}
        self.steps: list[StepTrace] = []
        self.keyframes: list[int] = []
        self.last = ""  # the last thing that was said
        self._leave = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(server,), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _read(self, server: Endpoint) -> None:
        decoder = StepDecoder()
        with server.stream("GET", "/v1/trace/steps") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                self.last = line.removeprefix("data: ")
                if not self.head:
                    self.head = json.loads(self.last)
                    self._ready.set()
                elif self.last.startswith('{"step"'):
                    step = json.loads(self.last)
                    if step["keyframe"]:
                        self.keyframes.append(step["step"])
                    self.steps.append(decoder.decode(step))
                if self._leave.is_set():
                    return

    @property
    def numbers(self) -> list[int]:
        return [step.step for step in self.steps]

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def leave(self) -> None:
        self._leave.set()


@contextmanager
def busy(server: Endpoint, max_tokens: int = 300) -> Iterator[None]:
    """Somebody generates meanwhile."""
    client = server.client()
    stream = client.completions.create(model="script", prompt=[5] * 20, max_tokens=max_tokens, stream=True)
    reader = iter(stream)
    next(reader)
    thread = threading.Thread(target=lambda: list(reader), daemon=True)
    thread.start()
    yield
    thread.join(30)
    assert not thread.is_alive()


def test_the_steps_of_a_real_server_are_watched_from_its_first_to_its_last(server: ServerProcess) -> None:
    watcher = Watcher(server)
    assert watcher.head["format"] == "twinfer-trace"
    assert (watcher.head["model"], watcher.head["block_size"]) == ("tiny", 16)
    assert watcher.head["tier"] in ("reference", "fast")
    server.post("/v1/completions", {"prompt": "watch this", "max_tokens": 5, "ignore_eos": True})
    eventually(lambda: watcher.steps and watcher.steps[-1].finished, "the last step has come")
    assert watcher.numbers == list(range(watcher.numbers[0], watcher.numbers[0] + 5))
    assert list(watcher.steps[-1].finished.values()) == ["length"]
    assert watcher.keyframes == watcher.numbers[:1]
    tables = [next(iter(step.state.cache.block_tables.values())) for step in watcher.steps]
    assert len(set(tables)) == 1
    watcher.leave()


def test_one_who_comes_late_starts_at_a_keyframe_and_sees_what_the_others_see(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "KEYFRAME_INTERVAL", 10_000)
    with scripted_server(tier, DEV, config=TRACING, pause=0.002) as server:
        first = Watcher(server)
        with busy(server):
            eventually(lambda: len(first.steps) > 20, "the first one sees steps")
            second = Watcher(server)
            eventually(lambda: second.steps, "the second one sees steps")
        eventually(lambda: first.steps[-1].finished and second.steps[-1].finished, "both see the end")
        assert first.numbers == list(range(300))
        start = second.numbers[0]
        assert 20 <= start < 300
        assert second.keyframes[0] == start
        assert second.steps == first.steps[start:]
        assert first.keyframes == [0, start]  # made for the second one, and good for everybody


def decoded(events: list[bytes]) -> list[int]:
    """Numbers of the steps among them; raises when one of them is the difference from a step that is missing."""
    decoder = StepDecoder()
    contents = [text.rpartition(b"data: ")[2] for text in events]
    return [decoder.decode(json.loads(text)).step for text in contents if text.startswith(b'{"step"')]


def test_a_watcher_that_does_not_read_holds_up_nobody_and_goes_on_at_a_keyframe(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_watcher, "MAX_STEPS_BEHIND", 16)
    with (
        scripted_server(tier, DEV, config=TRACING, send_buffer=4096) as server,
        socket.socket() as silent,
    ):
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.settimeout(20)
        silent.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        silent.sendall(b"GET /v1/trace/steps HTTP/1.1\r\nHost: x\r\n\r\n")
        engine = server.server.engine
        eventually(lambda: engine._watchers, "it watches")
        answer = server.post("/v1/completions", {"prompt": [5] * 20, "max_tokens": 700})
        assert answer.json()["usage"]["completion_tokens"] == 700
        (watcher,) = engine._watchers
        assert len(watcher._steps) <= 32
        received = b""
        while b'"length"' not in received:
            chunk = silent.recv(1 << 16)
            assert chunk, "the server has closed the stream"
            received += chunk
        numbers = decoded(received.split(b"\n\n")[:-1])
    assert numbers == sorted(set(numbers))
    assert 20 < len(numbers) < 700
    assert engine._watchers == set()


def test_nothing_is_kept_or_encoded_when_the_last_watcher_has_left(tier: Tier) -> None:
    with scripted_server(tier, DEV, config=TRACING, pause=0.002) as server:
        watcher = Watcher(server)
        with busy(server, 400):
            eventually(lambda: watcher.steps, "it sees steps")
            watcher.leave()
            eventually(lambda: watcher.is_done and not server.server.engine._watchers, "it has left")
        assert server.core.traces == []
        assert 0 < len(watcher.steps) < 400


def test_the_stream_ends_in_order_when_the_server_does(tier: Tier) -> None:
    with scripted_server(tier, DEV, config=TRACING) as server:
        watcher = Watcher(server)
        server.server.engine._reader.get_loop().call_soon_threadsafe(server.server.stop)
        eventually(lambda: watcher.is_done, "the stream has ended")
        assert watcher.last == "[DONE]"


def test_a_watcher_is_told_that_the_engine_has_died(model: Path) -> None:
    with running(model, "reference", "--enable-dev-endpoints") as server, server.connect() as watching:
        watching.sendall(b"GET /v1/trace/steps HTTP/1.1\r\nHost: x\r\n\r\n")
        received = watching.recv(65536)
        os.kill(server.engine_pid, signal.SIGKILL)
        while b"[DONE]" not in received:
            chunk = watching.recv(65536)
            assert chunk, received
            received += chunk
        assert b"signal 9" in received


def test_a_silent_stream_says_now_and_then_that_it_is_alive() -> None:
    async def body() -> list[str]:
        gate = asyncio.Event()

        async def events() -> Any:
            yield "first"
            await gate.wait()
            yield "second"

        seen: list[str] = []
        async for text in with_signs_of_life(events(), 0.01):
            seen.append(text)
            if len(seen) == 4:
                gate.set()
        return seen

    seen = asyncio.run(body())
    assert (seen[0], seen[-1]) == ("first", "second")
    assert len(seen) >= 5
    assert set(seen[1:-1]) == {SIGN_OF_LIFE}


def test_a_watcher_starts_at_a_keyframe_and_loses_steps_only_to_another_one() -> None:
    async def body() -> list[str]:
        asked: list[None] = []
        watcher = StepWatcher(lambda: asked.append(None))
        watcher.put(StepRecord(False, "before it came"))
        watcher.put(StepRecord(True, "first"))
        for number in range(MAX_STEPS_BEHIND + 5):
            watcher.put(StepRecord(False, str(number)))
        assert len(asked) == 1  # it has fallen behind
        assert await anext(watcher) == "first"  # nothing is dropped before there is something to go on with
        watcher.put(StepRecord(True, "again"))
        watcher.end()
        return [step async for step in watcher]

    assert asyncio.run(body()) == ["again"]
