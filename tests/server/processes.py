"""Servers to test against: a real `twinfer serve` process, and one in this process whose model is a script."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai

from reference.contracts.protocols import Tier
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput, TokenLogprob
from reference.frontend.async_engine import AsyncLLM
from reference.frontend.engine_core import EngineCore
from reference.frontend.server.args import ServerArgs
from reference.frontend.server.serve import Server, bind
from tests.scripted import NO_WEIGHTS, ScriptedRunner, ScriptedTier, byte_tokenizer, make_scripted_config

KEY = "no key is asked for"


def eventually(condition: Callable[[], object], what: str, seconds: float = 10) -> None:
    """Wait until the condition holds; fails when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """A zombie that nobody has waited for yet is dead."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


class Endpoint:
    """How tests talk to a server."""

    url: str  # without /v1
    key: str = KEY

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=30, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=60, **options)

    def send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        return httpx2.request(method, self.url + path, timeout=30, **options)

    def stream(self, method: str, path: str, **options: Any) -> Any:
        """A context with a response that is read as it comes."""
        return httpx2.stream(method, self.url + path, timeout=30, **options)

    def client(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        """A figure of /metrics, summed over its labels."""
        lines = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (.+)$", self.get("/metrics").text, re.MULTILINE)
        assert lines, f"no metric {name}"
        return sum(map(float, lines))

    def is_idle(self) -> bool:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(name) for name in names)

    def connect(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=30)


class ServerProcess(Endpoint):
    """`twinfer serve` on a free port; ready when the constructor returns."""

    def __init__(
        self,
        model: Path | str,
        tier: str,
        *options: str,
        program: Sequence[str] = ("reference.frontend.cli", "serve"),
    ) -> None:
        self.model = str(model)
        command = [sys.executable, "-m", *program, "--model", self.model, "--tier", tier]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.output: list[str] = []
        for line in self.process.stdout:
            self.output.append(line)
            match = re.search(r"Listening on (http://\S+)/v1", line)
            if match:
                self.url = match[1]
                break
        else:
            raise AssertionError(f"the server did not start:\n{''.join(self.output)}")
        self._reader = threading.Thread(
            target=lambda: self.output.extend(self.process.stdout or ()), daemon=True
        )
        self._reader.start()

    @property
    def engine_pid(self) -> int:
        (pid,) = children(self.process.pid)
        return pid

    def stop(self, seconds: float = 20) -> int:
        """Ask it to end; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()

    @property
    def log(self) -> str:
        return "".join(self.output)


@contextmanager
def running(model: Path | str, tier: str, *options: str, **program: Sequence[str]) -> Iterator[ServerProcess]:
    """`program`: see `ServerProcess`."""
    server = ServerProcess(model, tier, *options, **program)
    try:
        yield server
    finally:
        server.stop()


class Always(Mapping[str, Sequence[int]]):
    """The same script for every request, whatever name the server gives it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def __getitem__(self, request_id: str) -> Sequence[int]:
        return self.tokens

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class PacedRunner(ScriptedRunner):
    """A script with a pause in each step, and logprobs.

    Every token has the log-probability -0.5; second best is always `second`, with -1.
    """

    pause = 0.0
    second = 5

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(self.pause)
        output = super().execute(schedule)
        pairs = {
            name: [(TokenLogprob(token, -0.5, 1), TokenLogprob(self.second, -1.0, 2)) for token in tokens]
            for name, tokens in output.sampled_token_ids.items()
        }
        return replace(output, logprobs=pairs)


class PacedTier(ScriptedTier):
    """See `PacedRunner`."""

    def make_model_runner(self, config: Any, checkpoint: Any, draft_checkpoint: Any = None) -> PacedRunner:
        options = dict(self.runner_options)
        pause, second = options.pop("pause", 0.0), options.pop("second", 5)
        runner = PacedRunner(config.cache.block_size, **options)
        runner.pause, runner.second = pause, second
        self.runner = runner
        return runner


class ScriptedServer(Endpoint):
    """A server in a thread of this process, on a scripted engine: see `scripted_server`."""

    def __init__(
        self,
        tier: Tier,
        args: ServerArgs,
        config: dict[str, Any],
        options: dict[str, Any],
        send_buffer: int | None = None,
    ) -> None:
        self.model = "script"
        self._send_buffer = send_buffer
        self.core = EngineCore(make_scripted_config(**config), PacedTier(tier, **options), NO_WEIGHTS)
        self._args = args
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        engine = await AsyncLLM.from_engine_core(self.core, byte_tokenizer())
        listener = bind("127.0.0.1", 0)
        if self._send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = Server(engine, self._args, "script")
        task = asyncio.create_task(self.server.serve(sockets=[listener]))
        while not self.server.started:
            await asyncio.sleep(0.01)
        self._ready.set()
        await task
        await engine.close()

    def stop(self) -> None:
        if self._thread.is_alive() and not self.server.should_exit:
            self._loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextmanager
def scripted_server(
    tier: Tier,
    args: ServerArgs | None = None,
    config: dict[str, Any] | None = None,
    send_buffer: int | None = None,
    **options: Any,
) -> Iterator[ScriptedServer]:
    """`config`: see `make_scripted_config`; `options`: those of `PacedRunner`.

    `send_buffer`: bytes that the kernel takes from the server for a client that does not read.
    """
    sizes = {"num_usable_blocks": 1000, "max_model_len": 1000} | (config or {})
    args = args or ServerArgs(access_log=False, shutdown_timeout=1)
    server = ScriptedServer(tier, args, sizes, options, send_buffer)
    try:
        yield server
    finally:
        server.stop()
