"""Where the engine core of an `AsyncLLM` runs: on its event loop, in a thread, or in a process of its own.

    make_client("inproc")    steps run on the event loop, which is deaf meanwhile: for tests and for stepping through
    make_client("thread")    one process; the core shares the interpreter lock with whoever serves requests
    make_client("process")   messages over ZeroMQ on a private unix socket: tokenizing and streaming cost no step time

All three take the same commands and give the same news (`core_messages`).
(vLLM: `EngineCoreClient.make_client`, `vllm/v1/engine/core_client.py`.)
"""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

import msgspec
import zmq
import zmq.asyncio

from reference.contracts.config import EngineConfig
from reference.contracts.protocols import Tier
from reference.frontend.core_loop import EngineCoreLoop, build_engine_core
from reference.frontend.core_messages import Command, CoreFailed, CoreReady, News, Shutdown
from reference.frontend.engine_args import EngineArgs
from reference.frontend.engine_core import EngineCore

ClientMode = Literal["inproc", "thread", "process"]
CLOSE_TIMEOUT_S = 5.0  # for the step that is running


class EngineDeadError(RuntimeError):
    """The engine core is gone; no request can be served any more."""


class AsyncEngineCoreClient(ABC):
    """The way to an engine core that runs by itself.

    Attributes:
        config: sizes and limits the core was built with.
        model_path: where its model was found; not set for a core that the caller has built.
    """

    config: EngineConfig
    model_path: Path

    @staticmethod
    async def make_client(mode: ClientMode, args: EngineArgs, tier: Tier) -> AsyncEngineCoreClient:
        """Start an engine core and wait until it is ready.

        Raises:
            ValueError: an option or the model is not acceptable.
            EngineDeadError: the core's process ended while it started.
        """
        if mode not in get_args(ClientMode):
            raise ValueError(f"mode must be 'inproc', 'thread' or 'process', got {mode!r}.")
        if mode == "process":
            return await ProcessClient.start(args, tier.name)
        core, path = await asyncio.to_thread(build_engine_core, args, tier)
        client = AsyncEngineCoreClient.from_core(mode, core)
        client.model_path = path
        return client

    @staticmethod
    def from_core(mode: ClientMode, core: EngineCore) -> AsyncEngineCoreClient:
        """The way to a core that the caller has built; it cannot be moved to another process."""
        if mode == "thread":
            return ThreadClient(core)
        if mode == "inproc":
            return InprocAsyncClient(core)
        raise ValueError(f"mode must be 'inproc' or 'thread' for a core that exists already, got {mode!r}.")

    @abstractmethod
    def send(self, command: Command) -> None:
        """Hand a command to the core; it is not waited for."""

    @abstractmethod
    async def receive(self) -> News:
        """The next news. Raises EngineDeadError when the core is gone."""

    @abstractmethod
    async def close(self) -> None:
        """End the core and wait for it. May be called again."""


class InprocAsyncClient(AsyncEngineCoreClient):
    """Every `receive` is a turn of the core's loop."""

    def __init__(self, core: EngineCore) -> None:
        self.config = core.config
        self._commands: list[Command] = []
        self._news: deque[News] = deque()
        self._wakeup = asyncio.Event()
        self.loop = EngineCoreLoop(core, self._take_commands, self._news.append)

    def _take_commands(self, block: bool) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def send(self, command: Command) -> None:
        self._commands.append(command)
        self._wakeup.set()

    async def receive(self) -> News:
        while not self._news:
            if not self._commands and not self.loop.core.has_unfinished_requests():
                self._wakeup.clear()
                await self._wakeup.wait()
            await asyncio.sleep(0)  # between two steps everybody else gets a turn
            self.loop.turn(block=False)
            if self.loop.is_stopping:
                raise EngineDeadError("The engine was shut down.")
        return self._news.popleft()

    async def close(self) -> None:
        self.send(Shutdown())


class ThreadClient(AsyncEngineCoreClient):
    """The core's loop in a daemon thread, between two queues."""

    def __init__(self, core: EngineCore) -> None:
        self.config = core.config
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._event_loop = asyncio.get_running_loop()
        self.loop = EngineCoreLoop(core, self._take_commands, self._publish)
        self._thread = threading.Thread(target=self.loop.run, name="engine-core", daemon=True)
        self._thread.start()

    def _take_commands(self, block: bool) -> list[Command]:
        commands = [self._commands.get()] if block else []
        with suppress(queue.Empty):
            while True:
                commands.append(self._commands.get_nowait())
        return commands

    def _publish(self, news: News) -> None:
        with suppress(RuntimeError):  # the event loop has been closed: nobody wants to know any more
            self._event_loop.call_soon_threadsafe(self._news.put_nowait, news)

    def send(self, command: Command) -> None:
        self._commands.put(command)

    async def receive(self) -> News:
        return _unless_failed(await self._news.get())

    async def close(self) -> None:
        self.send(Shutdown())
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)


class ProcessClient(AsyncEngineCoreClient):
    """The core in a process of its own: see `core_process`, which runs there.

    Besides the ZeroMQ socket the two share a pair of sockets that carries nothing. An end is closed when its holder
    dies, however it dies, and the other notices at once: no signal, no polling, no process left behind.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="twinfer-"))  # mode 0700
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(News)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        path = self._folder / "engine"
        self._address = f"ipc://{path}"
        self._socket.bind(self._address)
        path.chmod(0o600)
        self._died = asyncio.Event()
        self._is_closed = False
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    async def start(cls, args: EngineArgs, tier_name: str) -> ProcessClient:
        client = cls()
        try:
            client._spawn(args, tier_name)
            news = await client.receive()
            assert isinstance(news, CoreReady)
        except BaseException:
            await client.close()
            raise
        client.config, client.model_path = news.config, Path(news.model_path)
        return client

    def _spawn(self, args: EngineArgs, tier_name: str) -> None:
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            options = msgspec.json.encode({"tier": tier_name, "args": asdict(args)}).decode()
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "reference.frontend.core_process",
                    self._address,
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"TWINFER_CORE_OPTIONS": options},
                pass_fds=(theirs.fileno(),),
            )
        self._lifeline.setblocking(False)
        asyncio.get_running_loop().add_reader(self._lifeline, self._notice_death)

    def _notice_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._lifeline)
        self._died.set()

    def send(self, command: Command) -> None:
        if not self._died.is_set():
            self._socket.send(self._encoder.encode(command))

    async def receive(self) -> News:
        received = asyncio.ensure_future(self._socket.recv())
        died = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait((received, died), return_when=asyncio.FIRST_COMPLETED)
            if not received.done() and not await self._socket.poll(0):  # its last words come first
                raise EngineDeadError(f"The engine process has died ({self._describe_exit()}).")
            return _unless_failed(self._decoder.decode(await received))
        finally:
            received.cancel()
            died.cancel()

    def _describe_exit(self) -> str:
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)  # the lifeline breaks a moment before the process is gone
        status = self.process.returncode
        return f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self.process is not None:
            self.send(Shutdown())
            await asyncio.to_thread(self._end_process)
            asyncio.get_running_loop().remove_reader(self._lifeline)
            self._lifeline.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_process(self) -> None:
        assert self.process is not None
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _unless_failed(news: News) -> News:
    if isinstance(news, CoreFailed):
        raise ValueError(news.reason) if news.is_refusal else EngineDeadError(news.reason)
    return news
