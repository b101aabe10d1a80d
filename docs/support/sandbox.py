"""The engine's scheduler and cache manager for a page that runs them in the reader's browser, on scripted tokens.

Everything here, and all that it imports, is Python's standard library and this project: Pyodide brings the first, the
build packs the second (`docs/support/sandbox_build.py`). The page's JavaScript hands over what the form says as JSON
and gets steps back as JSON; decisions, sentences and pictures are made by the same code as on every other page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.sentences import step_sentence
from docs.support.pictures import pool_picture, timeline
from docs.support.runs import Arrival, run
from reference import TIER
from reference.contracts.trace import StepTrace

_MOST_REQUESTS = 12

# Name in the form -> least, most.
LIMITS: Mapping[str, tuple[int, int]] = {
    "blocks": (2, 96),
    "block_size": (1, 32),
    "budget": (1, 512),
    "max_num_seqs": (1, 32),
    "chunk": (0, 512),
    "prompt": (1, 300),
    "shared": (0, 300),
    "tokens": (1, 100),
    "arrives": (0, 200),
    "priority": (-9, 9),
    "n": (1, 8),
}
CHOICES: Mapping[str, tuple[str, ...]] = {"policy": ("fcfs", "priority"), "preemption": ("recompute", "swap")}
REQUEST_FIELDS = ("prompt", "shared", "tokens", "arrives", "priority", "n")

_COMMON = {
    "blocks": 12, "block_size": 4, "budget": 16, "max_num_seqs": 8, "chunk": 0, "policy": "fcfs",
    "preemption": "recompute", "caching": True,
}  # fmt: skip


def _ask(name: str, prompt: int, tokens: int, **more: int) -> dict[str, Any]:
    return {
        "name": name, "prompt": prompt, "shared": 0, "tokens": tokens, "arrives": 0, "priority": 0, "n": 1, **more,
    }  # fmt: skip


def _preset(title: str, watch: str, requests: Sequence[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return {"title": title, "watch": watch, "settings": {**_COMMON, **options, "requests": list(requests)}}


_CROWD = (_ask("a", 9, 10), _ask("b", 10, 10), _ask("c", 9, 10))
_TIGHT: Mapping[str, Any] = {"blocks": 10, "budget": 32, "caching": False}  # too few blocks for them

PRESETS: Mapping[str, dict[str, Any]] = {
    "mixed": _preset(
        "Prompts and answers in one step",
        "c arrives in step 1 with 14 tokens and computes them in pieces, while a and b answer in the same steps.",
        (_ask("a", 9, 7), _ask("b", 6, 5), _ask("c", 14, 4, arrives=1), _ask("d", 3, 6, arrives=2)),
        blocks=16,
        budget=12,
    ),
    "preemption": _preset(
        "Not enough blocks",
        "Three requests need more blocks than there are. Look for the step in which c gives way, and what it costs.",
        _CROWD,
        **_TIGHT,
    ),
    "swap": _preset(
        "Not enough blocks, with a host pool",
        "The same requests, but the victim's blocks are copied to the host pool and come back from there.",
        _CROWD,
        **_TIGHT,
        preemption="swap",
    ),
    "prefix": _preset(
        "One system prompt for all",
        "The first 12 tokens of all prompts are the same. b, c and d point to a's blocks instead of computing them.",
        (
            _ask("a", 15, 6, shared=12),
            _ask("b", 14, 6, shared=12, arrives=1),
            _ask("c", 17, 6, shared=12, arrives=2),
            _ask("d", 13, 6, shared=12, arrives=8),
        ),
        blocks=20,
        budget=24,
    ),
    "copy": _preset(
        "Three answers to one prompt",
        "a asks for three samples. They share all blocks of the prompt; who writes into the last one first copies it.",
        (_ask("a", 10, 7, n=3),),
        blocks=14,
    ),
    "priority": _preset(
        "An urgent request comes late",
        "d comes last and is the most urgent: a smaller number runs first. Try the policy fcfs as well.",
        (
            _ask("a", 8, 8, priority=5),
            _ask("b", 8, 8, priority=5),
            _ask("c", 8, 8, priority=4),
            _ask("d", 5, 4, arrives=2),
        ),
        blocks=9,
        budget=32,
        policy="priority",
        max_num_seqs=3,
    ),
}  # fmt: skip


def arrivals(settings: Mapping[str, Any]) -> list[Arrival]:
    """The requests of a form, checked.

    Raises:
        ValueError: there is none, there are too many, a name stands twice, or a number is out of its range.
    """
    requests = settings["requests"]
    if not 1 <= len(requests) <= _MOST_REQUESTS:
        raise ValueError(f"Give between 1 and {_MOST_REQUESTS} requests, not {len(requests)}.")
    names = [str(request["name"]).strip() for request in requests]
    for name in names:
        if not name or len(name) > 6:
            raise ValueError(f"Give each request a name of 1 to 6 characters, not {name!r}.")
        if names.count(name) > 1:
            raise ValueError(f"Two requests are called {name!r}; give each a name of its own.")
    found = []
    for name, request in zip(names, requests, strict=True):
        value = {field: _number(request, field, f" of {name}") for field in REQUEST_FIELDS}
        shared = min(value["shared"], value["prompt"])
        first = 300 + sum(map(ord, name)) * 7 % 300
        prompt = (*range(shared), *range(first, first + value["prompt"] - shared))
        found.append(Arrival(name, prompt, value["tokens"], value["arrives"], value["priority"], value["n"]))
    return found


def options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `make_core` from a form. Raises ValueError when one is out of its range."""
    for name, allowed in CHOICES.items():
        if settings[name] not in allowed:
            raise ValueError(f"{name} must be {' or '.join(allowed)}, not {settings[name]!r}.")
    blocks = _number(settings, "blocks")
    return {
        "blocks": blocks,
        "block_size": _number(settings, "block_size"),
        "budget": _number(settings, "budget"),
        "caching": bool(settings["caching"]),
        "host_blocks": blocks + 1 if settings["preemption"] == "swap" else 0,
        "max_num_seqs": _number(settings, "max_num_seqs"),
        "long_prefill_token_threshold": _number(settings, "chunk"),
        "scheduling_policy": settings["policy"],
        "preemption_mode": settings["preemption"],
    }


def _number(values: Mapping[str, Any], name: str, of: str = "") -> int:
    least, most = LIMITS[name]
    value = values[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}{of} must be a whole number from {least} to {most}, not {value!r}.")
    return value


@dataclass(frozen=True)
class Session:
    """A run to its end, shown step by step."""

    traces: Sequence[StepTrace]
    names: Sequence[str]  # every sequence that ever runs, in the order of its first step

    def overview(self) -> dict[str, Any]:
        """What is said of the run as a whole."""
        traces = self.traces
        return {
            "num_steps": len(traces),
            "timeline": timeline(
                traces, "The schedule. A number counts the tokens of a prefill; click on a step"
            ),
            "totals": {
                "steps": len(traces),
                "tokens computed": sum(trace.budget_used for trace in traces),
                "tokens found in the cache": sum(sum(t.num_cached_tokens.values()) for t in traces),
                "preemptions": sum(len(trace.preempted) for trace in traces),
                "copies on write": sum(len(trace.block_copies) for trace in traces),
                "blocks swapped out": sum(len(trace.swap_outs) for trace in traces),
            },
        }

    def step(self, number: int) -> dict[str, Any]:
        """What is shown of one step."""
        trace = self.traces[number]
        state, cache = trace.state, trace.state.cache
        num_blocks = len(cache.ref_counts) + cache.num_free_blocks
        return {
            "say": step_sentence(trace, str, "en"),
            "why": [*trace.preemption_reasons.values(), *trace.refusal_reasons.values()],
            "budget": f"{trace.budget_used} of {trace.token_budget} tokens",
            "pool": pool_picture(
                trace,
                per_row=10 if num_blocks <= 40 else 12,
                caption=f"The block pool in step {trace.step}",
                names=self.names,
            ),
            "queues": {"running": state.running, "waiting": state.waiting, "swapped": state.swapped},
            "free": cache.free_order,
            "tables": [
                {
                    "name": name,
                    "owner": self.names.index(name) % 6,
                    "now": trace.num_scheduled_tokens.get(name, 0),
                    "computed": state.num_computed_tokens.get(name, 0),
                    "known": state.num_tokens.get(name, 0),
                    "blocks": table,
                }
                for name, table in cache.block_tables.items()
            ],
            "host": [{"name": name, "blocks": table} for name, table in cache.host_tables.items()],
        }


def start(settings: Mapping[str, Any]) -> Session:
    """Run what the form says to its end.

    Raises:
        ValueError: a value is out of its range, or a request can never run.
    """
    traces = run(*arrivals(settings), tier=TIER, **options(settings))
    names = dict.fromkeys(name for trace in traces for name in trace.state.cache.block_tables)
    return Session(traces, list(names))


class Desk:
    """What the page holds on to: takes JSON, gives JSON."""

    def __init__(self) -> None:
        self._session: Session | None = None

    def play(self, text: str) -> str:
        """Run a form's settings; an object with `num_steps`, `timeline` and `totals`, or with `error`."""
        try:
            self._session = start(json.loads(text))
        except ValueError as error:
            return json.dumps({"error": str(error)})
        return json.dumps(self._session.overview())

    def show(self, number: int) -> str:
        """One step of the last run."""
        assert self._session is not None, "play() comes first"
        return json.dumps(self._session.step(number))
