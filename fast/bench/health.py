"""`twinfer bench health`: how soon /health is answered while the server is busy with what nobody should send.

    a body of 8 MiB          as large as a body may be, and all of it numbers
    131,000 token ids        nearly as many values as JSON may have, in a field that takes them
    a text of 20,000 words   which has to be tokenized, and is too long or nearly so
    a header of 1 MiB        beyond every limit

Who watches over servers asks /health once a second and restarts one that does not answer. So none of these may keep the
event loop from answering; each is sent again and again, by two clients at a time, while /health is asked on a new
connection every 10 ms.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fast.bench.plots import bars
from fast.bench.results import Document, make_document, print_table, report
from fast.bench.serve import LoadClient, percentiles

MIB = 1024**2
CLIENTS = 2
INTERVAL_S = 0.01
TIMEOUT_S = 60.0

Disturb = Callable[
    [str, int, dict[str, str]], int
]  # (host, port, headers) -> status of the answer, 0 for none


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    """The server may be of any make, so no tier is asked for."""
    group = parser.add_argument_group("health", "A server that runs, of any make.")
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: http://127.0.0.1:8000)"
    )
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    group.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="time for each kind of request (default: 5)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure. Returns 0, or 1 when /health once did not say 200.

    Raises:
        ValueError: no server answers, or the time is not above 0.
    """
    if arguments.seconds <= 0:
        raise ValueError("--seconds must be above 0.")
    client = LoadClient(arguments.base_url, arguments.api_key)
    parts = urlsplit(arguments.base_url)
    host, port = parts.hostname or "", parts.port or 80
    headers = {} if arguments.api_key is None else {"Authorization": f"Bearer {arguments.api_key}"}
    rows = [
        measure(name, disturb, host, port, headers, arguments.seconds)
        for name, disturb in DISTURBANCES.items()
    ]
    document = make_document("health", model=client.model, disturbances=rows)
    report(arguments, document, lambda: _print(document), lambda figure: _draw(document, figure))
    return 0 if all(row["failed"] == 0 for row in rows) else 1


def measure(
    name: str, disturb: Disturb | None, host: str, port: int, headers: dict[str, str], seconds: float
) -> dict[str, Any]:
    """Times of /health in ms, and what became of the disturbing requests meanwhile."""
    end = time.perf_counter() + seconds
    statuses: Counter[int] = Counter()
    threads = []
    if disturb is not None:
        threads = [
            threading.Thread(target=_repeat, args=(disturb, host, port, headers, end, statuses))
            for _ in range(CLIENTS)
        ]
    for thread in threads:
        thread.start()
    times, failed = [], 0
    while time.perf_counter() < end:
        started = time.perf_counter()
        failed += _ask(host, port) != 200
        times.append(time.perf_counter() - started)
        time.sleep(INTERVAL_S)
    for thread in threads:
        thread.join()
    p50, p90, p99 = percentiles(times)
    return {
        "during": name,
        "asked": len(times),
        "failed": failed,
        "ms": {"p50": p50, "p90": p90, "p99": p99, "max": 1000 * max(times)},
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
    }


def _repeat(
    disturb: Disturb, host: str, port: int, headers: dict[str, str], end: float, statuses: Counter[int]
) -> None:
    while time.perf_counter() < end:
        statuses[disturb(host, port, headers)] += 1


def _ask(host: str, port: int) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def large_body(host: str, port: int, headers: dict[str, str]) -> int:
    """8 MiB of numbers, just below the limit: to be parsed, and refused."""
    body = b'{"prompt": "x", "numbers": [' + b"1," * ((8 * MIB - 64) // 2) + b"1]}"
    return _post(host, port, headers, body)


def many_ids(host: str, port: int, headers: dict[str, str]) -> int:
    """131,000 token ids: to be parsed and checked, and too many for any model."""
    return _post(host, port, headers, b'{"prompt": [' + b"12345," * 130_999 + b"12345]}")


def long_text(host: str, port: int, headers: dict[str, str]) -> int:
    """20,000 words. A model that can take them gets one token to write."""
    return _post(host, port, headers, json.dumps({"prompt": "word " * 20_000, "max_tokens": 1}).encode())


def large_header(host: str, port: int, headers: dict[str, str]) -> int:
    """1 MiB in one line; a server hangs up as soon as it has read enough."""
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * MIB + b"\r\n\r\n"
    answer = b""
    with suppress(OSError), socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
        with suppress(OSError):
            connection.sendall(head)
        answer = connection.recv(64)
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def _post(host: str, port: int, headers: dict[str, str], body: bytes) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", body, {**headers, "Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


DISTURBANCES: dict[str, Disturb | None] = {
    "nothing": None,
    "body of 8 MiB": large_body,
    "131,000 token ids": many_ids,
    "text of 20,000 words": long_text,
    "header of 1 MiB": large_header,
}


def _print(document: Document) -> None:
    rows = [
        [
            row["during"], str(row["asked"]), str(row["failed"]),
            *(f"{row['ms'][name]:.1f}" for name in ("p50", "p90", "p99", "max")),
            ", ".join(f"{count} x {status}" for status, count in row["statuses"].items()) or "-",
        ]
        for row in document["disturbances"]
    ]  # fmt: skip
    headings = [
        "while the server gets",
        "asked",
        "failed",
        "p50",
        "p90",
        "p99",
        "max",
        "answers (0: none)",
    ]
    print_table("Time until /health is answered, ms", headings, rows)


def _draw(document: Document, figure: Any) -> None:
    rows = document["disturbances"]
    names = [row["during"] for row in rows]
    bars(
        figure.subplots(),
        "Time until /health is answered, p99",
        names,
        [row["ms"]["p99"] for row in rows],
        "ms",
    )
