"""The workload file: requests with the steps at which they arrive, replayable on any tier.

JSON lines. The first may be `{"config": {engine options}}`; each other line is a request:

    {"id": "a", "prompt": "...", "arrival_step": 0, "abort_step": null, "priority": 0, "cache_salt": null,
     "sampling_params": {"temperature": 0, "max_tokens": 32}}

with "prompt", "prompt_token_ids" or "messages". Only the prompt is required. Step t begins with the requests whose
`arrival_step` is t, in the order of the file, then aborts those whose `abort_step` is t and that are not finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from reference.contracts.sampling_params import SamplingParams
from reference.contracts.structured_outputs import StructuredOutputsParams
from reference.frontend.engine_args import EngineArgs
from reference.frontend.input_processor import Prompt
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput

_REQUEST_KEYS = (
    "id", "prompt", "prompt_token_ids", "messages", "arrival_step", "abort_step", "priority", "cache_salt",
    "sampling_params",
)  # fmt: skip
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
_SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "prompt": ("text", lambda value: isinstance(value, str)),
    "prompt_token_ids": (
        "a list of whole numbers",
        lambda value: isinstance(value, list) and all(type(item) is int for item in value),
    ),
    "messages": (
        "a list of {'role': text, 'content': text}",
        lambda value: isinstance(value, list) and all(_is_message(item) for item in value),
    ),
    "cache_salt": ("text", lambda value: isinstance(value, str)),
}
_NO_LIMIT = 2**31 - 1  # tokens: longer than any model's context
_PARAM_NAMES = tuple(f.name for f in fields(SamplingParams) if f.init)


@dataclass(frozen=True)
class WorkloadRequest:
    """One line of the file. Exactly one of `prompt`, `prompt_token_ids` and `messages` is set."""

    request_id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    arrival_step: int = 0
    abort_step: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)

    def to_json(self) -> dict[str, Any]:
        """The line as a table, defaults left out."""
        line: dict[str, Any] = {"id": self.request_id}
        for name in (*_PROMPT_KEYS, "abort_step", "cache_salt"):
            if getattr(self, name) is not None:
                line[name] = getattr(self, name)
        for name in ("arrival_step", "priority"):
            if getattr(self, name):
                line[name] = getattr(self, name)
        defaults = SamplingParams()
        changed = {
            n: getattr(self.params, n)
            for n in _PARAM_NAMES
            if getattr(self.params, n) != getattr(defaults, n)
        }
        if self.params.structured_outputs is not None:
            changed["structured_outputs"] = self.params.structured_outputs.to_json()
        if self.params.max_tokens is None:  # null would mean absent, and that is not "no limit"
            changed["max_tokens"] = _NO_LIMIT
        return {**line, "sampling_params": changed} if changed else line


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, and the engine options they are meant for."""

    requests: tuple[WorkloadRequest, ...]
    config: dict[str, Any] = field(default_factory=dict)


def read_workload(path: Path) -> Workload:
    """Read a workload file.

    Raises:
        ValueError: the file cannot be read, or a line is not acceptable; the sentence names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    try:
        return parse_workload(text.split("\n"))  # not splitlines(): JSON text may hold U+2028 and its like
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_workload(lines: Iterable[str]) -> Workload:
    """See `read_workload`; empty lines are skipped."""
    config: dict[str, Any] = {}
    requests: list[WorkloadRequest] = []
    ids: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("a line must be a JSON object")
            if "config" in entry:
                if requests or config or set(entry) != {"config"}:
                    raise ValueError("the config must be the first line and stand alone")
                config = _parse_config(entry["config"])
                continue
            request = _parse_request(entry, default_id=f"r{len(requests)}")
            if request.request_id in ids:
                raise ValueError(f"the id {request.request_id!r} is used twice")
        except (ValueError, RecursionError) as error:
            is_json = not isinstance(error, json.JSONDecodeError | RecursionError)
            reason = str(error).removesuffix(".") if is_json else "it is not valid JSON"
            raise ValueError(f"line {number}: {reason}.") from error
        ids.add(request.request_id)
        requests.append(request)
    if not requests:
        raise ValueError("the workload holds no request; write one a line.")
    return Workload(tuple(requests), config)


def write_workload(workload: Workload, path: Path) -> None:
    """Write a file that `read_workload` reads back."""
    lines = [json.dumps({"config": workload.config})] if workload.config else []
    lines += [json.dumps(request.to_json(), ensure_ascii=False) for request in workload.requests]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _parse_config(config: Any) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise ValueError("config must be a table of engine options")
    unknown = sorted(set(config) - set(EngineArgs.__dataclass_fields__))
    if unknown:
        raise ValueError(f"unknown engine option {unknown[0]!r}")
    return config


def _parse_request(entry: dict[str, Any], default_id: str) -> WorkloadRequest:
    unknown = sorted(set(entry) - set(_REQUEST_KEYS))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(_REQUEST_KEYS)}")
    present = {name: value for name, value in entry.items() if value is not None}  # null means absent
    if sum(name in present for name in _PROMPT_KEYS) != 1:
        raise ValueError("a request needs exactly one of 'prompt', 'prompt_token_ids' and 'messages'")
    request_id = present.get("id", default_id)
    if not isinstance(request_id, str) or not request_id:
        raise ValueError(f"id must be a non-empty text, got {request_id!r}")
    for name in ("arrival_step", "abort_step", "priority"):
        value = present.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 0 and name != "priority"):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    if present.get("abort_step", math.inf) < present.get("arrival_step", 0):
        raise ValueError("abort_step lies before arrival_step; a request cannot end before it arrives")
    for name, (kind, is_right) in _SHAPES.items():
        if name in present and not is_right(present[name]):
            raise ValueError(f"{name} must be {kind}")
    return WorkloadRequest(
        request_id=request_id,
        prompt=present.get("prompt"),
        prompt_token_ids=tuple(present["prompt_token_ids"]) if "prompt_token_ids" in present else None,
        messages=tuple(present["messages"]) if "messages" in present else None,
        arrival_step=present.get("arrival_step", 0),
        abort_step=present.get("abort_step"),
        priority=present.get("priority", 0),
        cache_salt=present.get("cache_salt"),
        params=parse_sampling_params(present.get("sampling_params", {})),
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def parse_sampling_params(raw: Any) -> SamplingParams:
    """`SamplingParams` from a JSON table.

    Null means absent.

    Raises:
        ValueError: a name is unknown, or a value is not acceptable.
    """
    if not isinstance(raw, dict):
        raise ValueError("sampling_params must be a table")
    unknown = sorted(set(raw) - set(_PARAM_NAMES))
    if unknown:
        raise ValueError(f"unknown sampling parameter {unknown[0]!r}")
    params = {name: value for name, value in raw.items() if value is not None}
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams.from_json(params["structured_outputs"])
    return SamplingParams(**params)


class WorkloadRun:
    """Plays a workload on an engine, step by step: adds and aborts requests when their step comes.

    Attributes:
        step_number: the step of the workload that comes next. Steps in which the engine would have nothing to do are
            passed over.
        finished: the last output of each request that has ended, by id.
    """

    def __init__(self, engine: LLMEngine, workload: Workload) -> None:
        self.engine = engine
        self.step_number = 0
        self.finished: dict[str, RequestOutput] = {}
        self._arriving = sorted(workload.requests, key=lambda request: request.arrival_step)  # stable
        self._aborting = {r.request_id: r.abort_step for r in workload.requests if r.abort_step is not None}

    @property
    def is_done(self) -> bool:
        return not self._arriving and not self.engine.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """One step: arrivals, then aborts, then the engine.

        Raises:
            ValueError: a request that arrives is not acceptable; the sentence names it.
        """
        if self._arriving and not self.engine.has_unfinished_requests():
            self.step_number = max(self.step_number, self._arriving[0].arrival_step)
        while self._arriving and self._arriving[0].arrival_step <= self.step_number:
            self._add(self._arriving.pop(0))
        outputs = self.engine.abort_request(
            [r for r, step in self._aborting.items() if step == self.step_number]
        )
        outputs += self.engine.step()
        for output in outputs:
            if output.finished:
                self.finished[output.request_id] = output
        self.step_number += 1
        return outputs

    def _add(self, request: WorkloadRequest) -> None:
        try:
            self.engine.add_request(
                request.request_id,
                self._prompt(request),
                request.params,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
        except ValueError as error:
            raise ValueError(f"Request {request.request_id!r}: {error}") from error

    def _prompt(self, request: WorkloadRequest) -> Prompt:
        if request.messages is not None:
            tokenizer = self.engine.tokenizer
            return {
                "prompt": tokenizer.apply_chat_template(request.messages),
                "prompt_token_ids": tokenizer.encode_chat(request.messages),
            }
        return request.prompt if request.prompt is not None else list(request.prompt_token_ids or ())


def run_workload(
    engine: LLMEngine, workload: Workload, on_output: Callable[[RequestOutput], None] | None = None
) -> dict[str, RequestOutput]:
    """Play a workload to its end; returns the last output of each request by id."""
    run = WorkloadRun(engine, workload)
    while not run.is_done:
        for output in run.step():
            if on_output is not None:
                on_output(output)
    return run.finished
