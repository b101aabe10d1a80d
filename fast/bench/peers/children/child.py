"""The child's side of the protocol. It runs in the other engine's environment, so it uses the standard library only.

A line of JSON from standard input asks, a line on standard output answers:

    {"op": "load", "model": path, "threads": n}          {"configuration": in words, "versions": {name: version}}
    {"op": "run", "requests": [[[ids], max_tokens], ..]} {"seconds": s, "generated": [n, ..]}
    {"op": "quit"}                                       the process ends

An exception becomes {"error": sentence}. Libraries like to print: their standard output goes to standard error.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

Requests = Sequence[tuple[list[int], int]]  # (prompt ids, number of tokens to generate)


class Engine(Protocol):
    """What a script makes of its library."""

    configuration: str  # how it was set up, in words

    def run(self, requests: Requests) -> list[int]:
        """Generate for requests that are all there at once. Returns how many tokens each got."""
        ...


def share_a_prefix(requests: Requests) -> bool:
    """Whether more than half of the longest prompt is what all prompts begin with."""
    prompts = [ids for ids, _ in requests]
    columns = (set(column) for column in zip(*prompts, strict=False))  # up to the shortest prompt's end
    shared = sum(1 for _ in itertools.takewhile(lambda column: len(column) == 1, columns))
    return len(prompts) > 1 and 2 * shared > max(map(len, prompts))


def serve(load: Callable[[str, int], Engine], *packages: str) -> None:
    """Answer until the parent says quit or goes away. `load` takes the model's path and the number of threads."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine: Engine | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["op"] == "quit":
            break
        try:
            if asked["op"] == "load":
                engine = load(asked["model"], asked["threads"])
                answer: dict[str, Any] = {
                    "configuration": engine.configuration,
                    "versions": {package: version(package) for package in packages},
                }
            else:
                assert engine is not None, "load comes first"
                answer = _run(engine, asked["requests"])
        except Exception as error:  # whatever another engine raises is an answer
            answer = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run(engine: Engine, requests: Requests) -> dict[str, Any]:
    started = time.perf_counter()
    generated = engine.run([(ids, max_tokens) for ids, max_tokens in requests])
    return {"seconds": time.perf_counter() - started, "generated": generated}
