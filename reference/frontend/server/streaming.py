"""Server-sent events, and the end of requests whose client has gone away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
SIGN_OF_LIFE = ": idle\n\n"  # a comment: readers of server-sent events pass over it
SIGN_OF_LIFE_S = 15.0  # proxies give up on a silent connection after a minute or so


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def with_signs_of_life(
    events: AsyncGenerator[str, None], interval_s: float = SIGN_OF_LIFE_S
) -> AsyncGenerator[str, None]:
    """The same events, and a comment whenever none has come for so long."""
    pending: asyncio.Future[str] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(_next(events))
            done, _ = await asyncio.wait([pending], timeout=interval_s)
            if not done:
                yield SIGN_OF_LIFE
                continue
            try:
                text = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield text
    finally:
        if pending is not None:
            pending.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                await pending
        await events.aclose()


async def _next(events: AsyncGenerator[str, None]) -> str:
    return await anext(events)


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; it is cancelled when the client goes away, and ClientGoneError raised.

    The body must have been read: from then on, the only message that can come is the disconnect.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGoneError
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await worker


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: the stream; it is closed when the client goes away.
        on_close: called in any case, even if the stream was never begun.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], on_close: Callable[[], None]) -> None:
        self.events = events
        self.on_close = on_close
        self.background = None
        self.status_code = 200
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        super().init_headers(headers)
        # There is no body whose length could be known.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            self.on_close()
            for task in (sender, watcher):
                task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await sender
            await self.events.aclose()  # it may not have been running: a slow reader keeps the sender waiting

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self.events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
