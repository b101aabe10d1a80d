"""The steps of a running server, read from its `/v1/trace/steps` (server-sent events) in a thread of their own."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from reference.contracts.trace import StepTrace
from reference.frontend.trace_file import FORMAT, VERSION, StepDecoder

PATH = "/v1/trace/steps"
CONNECT_S = 5.0
SILENCE_S = 45.0  # the server sends a sign of life every 15
MAX_UNREAD = 4096  # events; then the reading stops until somebody looks, and the server drops what is too old
HOW_TO_START = "start one with `twinfer serve --enable-dev-endpoints`"


@dataclass(frozen=True)
class Head:
    """What a server says of its engine before the first step."""

    model: str
    tier: str
    block_size: int
    num_blocks: int


@dataclass(frozen=True)
class Lost:
    """The stream has ended. `is_final`: to try again would be of no use."""

    sentence: str
    is_final: bool


Event = Head | StepTrace | Lost


@dataclass(frozen=True)
class Address:
    """Where a server is: its name on the page, and what a connection needs."""

    url: str
    parts: SplitResult

    @classmethod
    def parse(cls, text: str, allow_remote: bool = False) -> Address:
        """From what somebody typed.

        Raises:
            ValueError: it is no address, or one of another machine and `allow_remote` is not set.
        """
        text = text.strip()
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https") or any(c.isspace() for c in text):
            raise ValueError(
                f"{text[:80]!r} is no address of a server; write one like http://127.0.0.1:8000."
            )
        if not allow_remote and not _is_loopback(host):
            raise ValueError(
                f"{host} is another machine, and this page watches servers of its own machine only; start the app with "
                f"--watch-remote to change that."
            )
        return cls(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", parts)

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        secure = self.parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self.parts.hostname or "", self.parts.port or (443 if secure else 80), timeout=timeout)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class StepStream:
    """One connection. A thread reads it; `events` hands over what has come.

    Args:
        address: of the server.
        api_key: sent as a bearer token when given.
    """

    def __init__(self, address: Address, api_key: str = "") -> None:
        self.address = address
        self._headers = {"Accept": "text/event-stream", **bearer(api_key)}
        self._events: queue.Queue[Event] = queue.Queue(MAX_UNREAD)
        self._is_closed = threading.Event()
        self._socket: socket.socket | None = None
        threading.Thread(target=self._run, name="twinfer-watch", daemon=True).start()

    def events(self, timeout: float) -> list[Event]:
        """All that has come; waits for the first, but no longer than `timeout` seconds. The last of all is a `Lost`."""
        events: list[Event] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        return events

    def close(self) -> None:
        """Hang up. The thread ends by itself."""
        self._is_closed.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _put(self, event: Event) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=0.5)
                return

    def _run(self) -> None:
        try:
            for event in self._read():
                self._put(event)
            self._put(Lost(f"The server at {self.address.url} has ended the stream.", is_final=False))
        except _RefusedError as error:
            self._put(Lost(str(error), is_final=True))
        except (OSError, http.client.HTTPException):
            self._put(Lost(f"Nobody answers at {self.address.url}; {HOW_TO_START}.", is_final=False))

    def _read(self) -> Iterator[Event]:
        with contextlib.closing(self.address.connect(CONNECT_S)) as connection:
            connection.connect()
            self._socket = connection.sock
            connection.request("GET", PATH, headers=self._headers)
            response = connection.getresponse()
            self._check(response)
            self._socket.settimeout(SILENCE_S)
            yield from self._messages(response)

    def _messages(self, response: http.client.HTTPResponse) -> Iterator[Event]:
        decoder, is_first = StepDecoder(), True
        while line := response.readline():
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return
            try:
                message = json.loads(line[6:])
                yield self._head(message) if is_first else self._step(message, decoder)
            except ValueError as error:  # also of the decoder
                raise _RefusedError(f"{self.address.url} sends what is no trace ({error}).") from error
            is_first = False

    def _check(self, response: http.client.HTTPResponse) -> None:
        url = self.address.url
        if response.status == 200 and response.headers.get_content_type() == "text/event-stream":
            return
        if response.status == 401:
            raise _RefusedError(f"The server at {url} wants its API key.")
        if response.status in (404, 405):
            raise _RefusedError(f"The server at {url} shows no steps; {HOW_TO_START}.")
        if response.status == 503:
            raise ConnectionError
        raise _RefusedError(
            f"What answers at {url} is no twinfer server (status {response.status}); {HOW_TO_START}."
        )

    def _head(self, message: Any) -> Head:
        if not isinstance(message, dict) or message.get("format") != FORMAT:
            raise ValueError("its first event does not say so")
        if message.get("version") != VERSION:
            raise ValueError(
                f"version {message.get('version')!r} of the format, and this program reads {VERSION}"
            )
        try:
            return Head(
                str(message["model"]),
                str(message["tier"]),
                int(message["block_size"]),
                int(message["num_blocks"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"its first event lacks {error}") from error

    def _step(self, message: Any, decoder: StepDecoder) -> StepTrace | Lost:
        if isinstance(message, dict) and "error" in message:
            return Lost(f"The engine of {self.address.url} has died.", is_final=False)
        return decoder.decode(message)


class _RefusedError(Exception):
    """Somebody is there, but there is nothing to watch."""


def bearer(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
