"""What every request passes before a route sees it: a name, limits, the API key, and a line in the log.

One plain ASGI middleware. The body is limited while it is read: nobody has to announce its length truthfully.
"""

from __future__ import annotations

import json
import re
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from hashlib import sha256
from hmac import compare_digest
from secrets import token_bytes, token_hex
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reference.frontend.logger import logger
from reference.frontend.server.args import Limits
from reference.frontend.server.errors import APIError
from reference.frontend.server.ui import check_visitor, is_ui

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
PUBLIC_PATHS = ("/health", "/favicon.ico")


OnAnswer = Callable[[str, str, int, float], None]


class KeyRing:
    """The API keys. Only digests are compared, in constant time, and all of them: no key is found out by the clock."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._secret = token_bytes(32)
        self._digests = [self._digest(key.encode()) for key in dict.fromkeys(keys)]

    def _digest(self, key: bytes) -> bytes:
        return sha256(self._secret + key).digest()

    def find(self, authorization: bytes, from_browser: bool = False) -> int | None:
        """Which key an Authorization header holds; None for none of them.

        `from_browser`: it may also be the password of the browser's own dialog (HTTP Basic), whatever the user's name.
        """
        scheme, _, key = authorization.partition(b" ")
        key = key.strip()
        if from_browser and scheme.lower() == b"basic":
            key = _password(key)
        elif scheme.lower() != b"bearer":
            return None
        digest = self._digest(key)
        matches = [compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if any(matches) else None

    def __bool__(self) -> bool:
        return bool(self._digests)

    def salt(self, key: int | None) -> str | None:
        """Keeps the prefixes of one key's requests out of the sight of the others; None with a single key."""
        return None if key is None or len(self._digests) < 2 else f"key {key}:"


class RequestGate:
    """The middleware.

    A route finds in its `scope["state"]`: `request_id`, `key` (the number of the API key, or None), and a dict `log` to
    which it may add what the access log should say.

    `on_answer` is told of every answer: method, address of the route, status, seconds.
    """

    def __init__(
        self, app: ASGIApp, limits: Limits, keys: KeyRing, access_log: bool, on_answer: OnAnswer
    ) -> None:
        self.app = app
        self.limits = limits
        self.keys = keys
        self.access_log = access_log
        self.on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = _find(headers, b"x-request-id")
        name = request_id.decode() if _REQUEST_ID.fullmatch(request_id) else token_hex(16)
        log: dict[str, Any] = {"status": None}
        scope.setdefault("state", {}).update(request_id=name, key=None, log=log)
        started = time.perf_counter()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                log["status"] = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            self._check_headers(headers)
            self._authorize(scope)
            await self.app(scope, self._limited(receive, headers), send_named)
        except APIError as error:
            await error.response()(scope, receive, send_named)
        finally:
            seconds = time.perf_counter() - started
            if log["status"] is not None:  # else the client has gone before there was one
                self.on_answer(
                    _method(scope), getattr(scope.get("route"), "path", "none"), log["status"], seconds
                )
            if self.access_log:
                self._write_log(scope, log, name, seconds)

    def _check_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        limits = self.limits
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if len(headers) > limits.max_headers or size > limits.max_header_bytes:
            raise APIError(
                431, f"The headers exceed {limits.max_header_bytes} bytes or {limits.max_headers} lines."
            )

    def _authorize(self, scope: Scope) -> None:
        headers, path = scope["headers"], scope["path"]
        if is_ui(path):
            check_visitor(
                _find(headers, b"host").decode("latin-1"), _find(headers, b"origin").decode("latin-1")
            )
        if self.keys and path not in PUBLIC_PATHS:
            key = self.keys.find(_find(headers, b"authorization"), from_browser=is_ui(path))
            if key is None:
                scheme = 'Basic realm="Twinfer: an API key is the password"' if is_ui(path) else "Bearer"
                raise APIError(
                    401,
                    "A valid API key is needed, as 'Authorization: Bearer KEY'.",
                    headers={"WWW-Authenticate": scheme},
                )
            scope["state"]["key"] = key

    def _limited(self, receive: Receive, headers: list[tuple[bytes, bytes]]) -> Receive:
        limit = self.limits.max_body_bytes
        error = APIError(413, f"The body exceeds {limit} bytes.", headers={"Connection": "close"})
        announced = _find(headers, b"content-length")
        if announced.isdigit() and int(announced) > limit:
            raise error
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                raise error
            return message

        return receive_limited

    def _write_log(self, scope: Scope, log: dict[str, Any], name: str, seconds: float) -> None:
        client = scope.get("client") or ("",)
        entry = {
            "request_id": name, "client": client[0], "method": scope["method"], "path": scope["path"][:256],
            "seconds": round(seconds, 4), **log,
        }  # fmt: skip
        logger.info("request %s", json.dumps(entry))


def _method(scope: Scope) -> str:
    """The client's own word may be anything."""
    return scope["method"] if scope["method"] in METHODS else "other"


def _password(credentials: bytes) -> bytes:
    """Of `user:password` in base64; empty when it is something else."""
    try:
        return b64decode(credentials, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _find(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")
