"""A real `twinfer serve` while the site is built, and a client that shows what is on the wire: docs/serving-http.md."""

from __future__ import annotations

import atexit
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

from docs.support.engines import MODEL
from docs.support.source import ROOT


@cache
def address() -> tuple[str, int]:
    """Host and port of the server, which is started by the first call and ended with this process.

    Raises:
        RuntimeError: it did not start; the message is what it wrote.
    """
    options = ["--tier", "fast", "--model", MODEL, "--max-model-len", "512", "--num-blocks", "129"]
    command = [sys.executable, "-m", "reference.frontend.cli", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    atexit.register(_stop, process)
    assert process.stdout is not None
    written = []
    for line in process.stdout:
        written.append(line)
        if found := re.search(r"Listening on http://([\d.]+):(\d+)/", line):
            return found[1], int(found[2])
    raise RuntimeError("the server did not start:\n" + "".join(written))


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(30)


def request(
    method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Status and body of the answer."""
    connection = http.client.HTTPConnection(*address(), timeout=60)
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, {"Content-Type": "application/json"} | (headers or {}))
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def stream(path: str, body: Any) -> Iterator[tuple[float, str]]:
    """(seconds since the request was sent, line) of the events of a streamed answer; closing it hangs up."""
    connection = http.client.HTTPConnection(*address(), timeout=60)
    started = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    try:
        for line in response:
            if line.strip():
                yield time.perf_counter() - started, line.decode().rstrip("\n")
    finally:
        connection.close()


def metric(name: str) -> float:
    """One of the server's own figures, summed over its labels."""
    _, text = request("GET", "/metrics")
    values = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    if not values:
        raise LookupError(f"the server has no metric {name}; mend the page that shows it")
    return sum(map(float, values))
