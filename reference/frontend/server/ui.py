"""The visualiser at /ui. The server knows an entry point and a path, and nothing of the package behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reference.frontend.server.errors import APIError

GROUP = "twinfer.pages"
UI_PATH = "/ui"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

Mount = Callable[[FastAPI, str], None]


def find_ui() -> Mount:
    """The function that adds the page. Raises ValueError when there is none, or a package it needs is missing."""
    for entry in entry_points(group=GROUP, name="app"):
        try:
            mount: Mount = entry.load()
        except ImportError as error:
            raise ValueError(
                f"The app needs packages that are not installed ({error}): pip install 'twinfer[app]'."
            ) from error
        return mount
    raise ValueError("The app is not installed; install the package again, with `pip install -e .[app]`.")


def is_ui(path: str) -> bool:
    return path == UI_PATH or path.startswith(f"{UI_PATH}/")


def check_visitor(host: str, origin: str) -> None:
    """Let in who has opened the page on this machine.

    The page runs engines and reads files, and a browser sends requests on behalf of any web page. Such a page is known
    by its Origin, or, if its name was made to point at this machine, by the Host.

    Raises:
        APIError: 403.
    """
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name.lower() not in LOOPBACK:
        raise APIError(403, f"The page is shown on this machine only: open http://127.0.0.1:PORT{UI_PATH}.")
    if origin and origin != f"http://{host}":
        raise APIError(403, "Another web page has asked; the page answers to itself alone.")


class OpenPages:
    """What pages keep open for as long as a browser shows them; nobody has to wait for that when the server stops."""

    def __init__(self) -> None:
        self._requests: set[asyncio.Task[None]] = set()

    def add(self, request: asyncio.Task[None]) -> None:
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    def end(self) -> None:
        for request in self._requests:
            request.cancel()


class PageRequests:
    """The middleware that keeps `OpenPages`."""

    def __init__(self, app: ASGIApp, pages: OpenPages) -> None:
        self.app = app
        self.pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_ui(scope["path"]):
            await self.app(scope, receive, send)
            return
        is_half_sent = False

        async def send_noted(message: Message) -> None:
            nonlocal is_half_sent
            is_half_sent = message["type"] == "http.response.start" or message.get("more_body", False)
            await send(message)

        request = asyncio.ensure_future(self._answer(scope, receive, send_noted))
        self.pages.add(request)
        try:
            await asyncio.wait([request])
        finally:
            request.cancel()
        with suppress(asyncio.CancelledError):  # the server stops
            await request
        if is_half_sent:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
