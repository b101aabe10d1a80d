"""`twinfer serve`: the process around the application, from the socket to the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import uvicorn

from reference.contracts.protocols import Tier
from reference.frontend.async_engine import AsyncLLM
from reference.frontend.core_client import ClientMode
from reference.frontend.engine_args import EngineArgs, describe
from reference.frontend.logger import configure_logging, logger
from reference.frontend.server.app import build_app
from reference.frontend.server.args import ServerArgs
from reference.frontend.server.ui import UI_PATH, OpenPages, find_ui

BACKLOG = 2048  # connections that may wait to be accepted
LAST_WORDS_S = 2  # for streams to say that they were aborted
DEAD_GRACE_S = 5.0  # /health says 503 for so long before the process ends
REQUEST_LINE_BYTES = 8192


def serve(engine_args: EngineArgs, args: ServerArgs, tier: Tier, mode: ClientMode = "process") -> int:
    """Serve until SIGINT or SIGTERM.

    Returns:
        0 after a signal, 1 when the engine has died.

    Raises:
        ValueError: an option or the model is not acceptable, or the address cannot be listened on.
    """
    configure_logging()
    if args.app:
        find_ui()  # a missing package is told now, and not when the model is loaded
    listener = bind(args.host, args.port)
    with listener:
        return asyncio.run(_serve(engine_args, args, tier, mode, listener))


def bind(host: str, port: int) -> socket.socket:
    """Take the address now, and listen when the model is loaded. Raises ValueError when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(
            f"Cannot listen on {host} port {port}: {error.strerror}; choose others with --host and --port."
        ) from error
    return listener


async def _serve(
    engine_args: EngineArgs, args: ServerArgs, tier: Tier, mode: ClientMode, listener: socket.socket
) -> int:
    if args.enable_dev_endpoints:
        engine_args = replace(engine_args, trace=True)
    engine = await AsyncLLM.from_engine_args(engine_args, tier, mode)
    try:
        model = args.served_model_name or engine_args.model
        server = Server(engine, args, model, banner(engine, args, model, tier.name, listener))
        return await server.run_until_stopped(listener)
    finally:
        await engine.close()


class Server(uvicorn.Server):
    """uvicorn's server, with signals, deadlines and an exit status of its own."""

    def __init__(self, engine: AsyncLLM, args: ServerArgs, model: str, banner: str = "") -> None:
        limits = args.limits
        app = build_app(engine, args, model)
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="on" if args.app else "off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                h11_max_incomplete_event_size=limits.max_header_bytes + REQUEST_LINE_BYTES,
                timeout_graceful_shutdown=math.ceil(args.shutdown_timeout) + LAST_WORDS_S,
            )
        )
        self.engine = engine
        self.pages: OpenPages = app.state.pages
        self.shutdown_timeout = args.shutdown_timeout
        self.banner = banner
        self.status = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not uvicorn's way: it raises a signal once more at the end, and the exit status would be the signal's."""
        yield

    async def run_until_stopped(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        self._spawn(self._watch_engine())
        await self.serve(sockets=[listener])
        if self.force_exit:  # then uvicorn leaves this out
            await self.lifespan.shutdown()
        return self.status

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.banner:
            print(self.banner, flush=True)

    def stop(self) -> None:
        """Accept nothing new, let unfinished requests finish for a while, then abort them."""
        if self.should_exit:
            self.force_exit = True  # told twice: now
        self.should_exit = True
        self.engine.end_watches()
        self._spawn(self._abort_late())
        self.pages.end()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _abort_late(self) -> None:
        await asyncio.sleep(self.shutdown_timeout)
        late = self.engine.unfinished_request_ids()
        if late:
            logger.warning("Shutting down: %d requests were not finished and are aborted.", len(late))
            self.engine.abort(late)

    async def _watch_engine(self) -> None:
        error = await self.engine.wait_until_dead()
        if self.should_exit:
            return
        logger.error("%s The server ends in %g seconds.", error, DEAD_GRACE_S)
        self.status = 1
        await asyncio.sleep(DEAD_GRACE_S)
        self.should_exit = True


def banner(engine: AsyncLLM, args: ServerArgs, model: str, tier: str, listener: socket.socket) -> str:
    """What an operator wants to see once: the model, its cache, the limits, the address."""
    config, limits = engine.config, args.limits
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    keys = f"{len(args.api_keys)} API keys" if args.api_keys else "no API key is asked for"
    app = f"\n  The app is at http://{shown}:{port}{UI_PATH}" if args.app else ""
    return "\n".join(
        (
            f"Twinfer serves {model} ({config.model.architecture}) on the {tier} tier.",
            f"  {describe(config)}",
            f"  Limits: {config.scheduler.max_num_seqs} requests run at once, {limits.max_queue_len} wait or run; "
            f"{config.scheduler.max_num_batched_tokens} tokens a step.",
            f"  A request: {limits.max_body_bytes} bytes at most, {limits.max_sequences} completions; {keys}.",
            f"  Listening on http://{shown}:{port}/v1{app}",
        )
    )
