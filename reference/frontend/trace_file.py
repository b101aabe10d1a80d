"""A trace as a file: one JSON document, versioned.

    {"format": "twinfer-trace", "version": 2, "sha256": "...", "steps": [one object a line]}

A pool of thousands of blocks changes by a few of them a step, so the state of a step is written as its difference from
the step before. Every 64th is a keyframe: a difference from the empty state, which is everything. A reader that wants
step n starts at the last keyframe before it. `GET /v1/trace/steps` of the server sends the same steps, one an event.

    an order   (queues, free queue)   pieces: [start, end] is that slice of the old order, anything else is an entry
    a table    (by request or block)  {"keys": their order, "set": [[key, value], ...] new or changed}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reference.contracts.trace import CacheSnapshot, SchedulerSnapshot, StepTrace

FORMAT = "twinfer-trace"
VERSION = 2
KEYFRAME_INTERVAL = 64  # steps

_EMPTY = SchedulerSnapshot((), (), (), {}, {}, CacheSnapshot({}, {}, (), {}, ()))
_WHOLE_FIELDS = tuple(name for name in StepTrace.__dataclass_fields__ if name != "state")


def write_trace(traces: Sequence[StepTrace], path: Path) -> None:
    """Write a file that `read_trace` reads back. Raises OSError when it cannot be written."""
    encoder = StepEncoder()
    lines = [encoder.encode(trace)[1] for trace in traces]
    head = {"format": FORMAT, "version": VERSION, "sha256": _checksum(lines)}
    path.write_text(f'{json.dumps(head)[:-1]}, "steps": [\n' + ",\n".join(lines) + "\n]}\n", encoding="ascii")


class StepEncoder:
    """Steps of one run, in order, each as the difference from the one before, and every 64th as a keyframe."""

    def __init__(self) -> None:
        self._before: SchedulerSnapshot | None = None
        self._num_since_keyframe = 0

    def restart(self) -> None:
        """The next step is a keyframe: somebody starts to read there."""
        self._before = None

    def encode(self, trace: StepTrace) -> tuple[bool, str]:
        """Whether it is a keyframe, and the JSON object."""
        if self._num_since_keyframe == KEYFRAME_INTERVAL:
            self._before = None
        is_keyframe = self._before is None
        self._num_since_keyframe = 1 if is_keyframe else self._num_since_keyframe + 1
        step = encode_step(trace, self._before)
        self._before = trace.state
        return is_keyframe, step


class StepDecoder:
    """The way back, from the first keyframe on."""

    def __init__(self) -> None:
        self._before: SchedulerSnapshot | None = None

    def decode(self, step: Any) -> StepTrace:
        """The trace of a step. `step` is what the JSON object has parsed to.

        Raises:
            ValueError: it is no step, or no keyframe has come yet.
        """
        try:
            before = _EMPTY if step["keyframe"] else self._before
            if before is None:
                raise ValueError("its difference is from a step that is missing")
            trace = _decode_step(step, before)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"a step that makes no sense ({type(error).__name__}: {error})") from error
        self._before = trace.state
        return trace


def encode_step(trace: StepTrace, before: SchedulerSnapshot | None = None) -> str:
    """One step as a JSON object, its state as the difference from `before`; without that, a keyframe."""
    entry = {name: getattr(trace, name) for name in _WHOLE_FIELDS}
    entry["keyframe"] = before is None
    entry["state"] = _encode_state(before or _EMPTY, trace.state)
    return _to_json(entry)


def read_trace(path: Path) -> list[StepTrace]:
    """The traces of a file, equal to those that were written.

    Raises:
        ValueError: the file cannot be read, is no trace, is damaged, or has another version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"Cannot read the trace {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no trace, or only a part of one: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} is no trace; record one with `twinfer trace WORKLOAD.jsonl --out FILE`.")
    if document.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {document.get('version')!r} of the trace format and this program reads version "
            f"{VERSION}; record it again."
        )
    steps = document.get("steps")
    if not isinstance(steps, list) or document.get("sha256") != _checksum(map(_to_json, steps)):
        raise ValueError(f"{path} is damaged: its checksum does not match; record it again.")
    decoder = StepDecoder()
    try:
        return [decoder.decode(step) for step in steps]
    except ValueError as error:
        raise ValueError(f"{path} holds {error}; record it again.") from error


def _to_json(step: Any) -> str:
    return json.dumps(step, separators=(",", ":"))


def _checksum(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _decode_step(step: Mapping[str, Any], before: SchedulerSnapshot) -> StepTrace:
    fields = {name: step[name] for name in _WHOLE_FIELDS}
    fields["preempted"] = tuple(fields["preempted"])
    for name in ("block_copies", "swap_outs", "swap_ins"):
        fields[name] = tuple(map(tuple, fields[name]))
    for name in ("sampled_token_ids", "draft_token_ids"):
        fields[name] = {request_id: tuple(ids) for request_id, ids in step[name].items()}
    return StepTrace(**fields, state=_decode_state(before, step["state"]))


def _encode_state(before: SchedulerSnapshot, after: SchedulerSnapshot) -> dict[str, Any]:
    return {
        "running": encode_order(before.running, after.running),
        "waiting": encode_order(before.waiting, after.waiting),
        "swapped": encode_order(before.swapped, after.swapped),
        "num_tokens": _encode_table(before.num_tokens, after.num_tokens),
        "num_computed_tokens": _encode_table(before.num_computed_tokens, after.num_computed_tokens),
        "block_tables": _encode_table(before.cache.block_tables, after.cache.block_tables),
        "ref_counts": _encode_table(before.cache.ref_counts, after.cache.ref_counts),
        "free_order": encode_order(before.cache.free_order, after.cache.free_order),
        "hashes": _encode_table(before.cache.hashes, after.cache.hashes),
        "evicted": after.cache.evicted,
        "host_tables": _encode_table(before.cache.host_tables, after.cache.host_tables),
    }


def _decode_state(before: SchedulerSnapshot, state: Mapping[str, Any]) -> SchedulerSnapshot:
    tables = _decode_table(before.cache.block_tables, state["block_tables"])
    host_tables = _decode_table(before.cache.host_tables, state["host_tables"])
    return SchedulerSnapshot(
        running=tuple(decode_order(before.running, state["running"])),
        waiting=tuple(decode_order(before.waiting, state["waiting"])),
        swapped=tuple(decode_order(before.swapped, state["swapped"])),
        num_tokens=_decode_table(before.num_tokens, state["num_tokens"]),
        num_computed_tokens=_decode_table(before.num_computed_tokens, state["num_computed_tokens"]),
        cache=CacheSnapshot(
            block_tables={request_id: tuple(table) for request_id, table in tables.items()},
            ref_counts=_decode_table(before.cache.ref_counts, state["ref_counts"]),
            free_order=tuple(decode_order(before.cache.free_order, state["free_order"])),
            hashes=_decode_table(before.cache.hashes, state["hashes"]),
            evicted=tuple(state["evicted"]),
            host_tables={request_id: tuple(table) for request_id, table in host_tables.items()},
        ),
    )


def encode_order(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """`after` in pieces of `before`. The entries of each are all different, and none is a list."""
    position = {entry: index for index, entry in enumerate(before)}
    pieces: list[Any] = []
    index = 0
    while index < len(after):
        start = position.get(after[index])
        length = 1
        if start is not None:
            while index + length < len(after) and position.get(after[index + length], -1) == start + length:
                length += 1
        pieces.append(after[index] if start is None or length == 1 else [start, start + length])
        index += length
    return pieces


def decode_order(before: Sequence[Any], pieces: Sequence[Any]) -> list[Any]:
    after: list[Any] = []
    for piece in pieces:
        if isinstance(piece, list):
            start, end = piece
            if not 0 <= start < end <= len(before):
                raise ValueError(f"entries {start} to {end} of {len(before)}")
            after.extend(before[start:end])
        else:
            after.append(piece)
    return after


def _encode_table(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[str, Any]:
    changed = [[key, value] for key, value in after.items() if key not in before or before[key] != value]
    return {"keys": encode_order(tuple(before), tuple(after)), "set": changed}


def _decode_table(before: Mapping[Any, Any], table: Mapping[str, Any]) -> dict[Any, Any]:
    changed = dict(map(tuple, table["set"]))
    first, *fresh = table["keys"] or [None]
    if first == [0, len(before)] and changed.keys() >= set(fresh):  # as a rule nothing has gone
        return {**before, **changed}
    keys = decode_order(tuple(before), table["keys"])
    return {key: changed[key] if key in changed else before[key] for key in keys}
