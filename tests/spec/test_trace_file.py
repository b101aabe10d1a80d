"""A trace that was written is read back as it was, or refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reference.contracts.trace import StepTrace
from reference.frontend.tiers import load_tier
from reference.frontend.trace_file import (
    KEYFRAME_INTERVAL,
    decode_order,
    encode_order,
    read_trace,
    write_trace,
)
from tests.spec.test_engine_core import request, run
from tests.spec.test_trace import make_core


def long_run() -> list[StepTrace]:
    core = make_core(load_tier("reference"), block_size=4, num_usable_blocks=500)
    core.add_request(request("a", range(300, 400), max_tokens=KEYFRAME_INTERVAL + 40))
    core.add_request(request("b", range(300, 350), arrival=1, max_tokens=KEYFRAME_INTERVAL + 40))
    run(core)
    return core.traces


@pytest.fixture(scope="module")
def traces() -> list[StepTrace]:
    return long_run()


@pytest.fixture
def written(traces: list[StepTrace], tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    write_trace(traces, path)
    return path


def test_what_is_read_equals_what_was_written(traces: list[StepTrace], written: Path) -> None:
    again = read_trace(written)
    assert again == traces
    assert all(type(trace.preempted) is tuple for trace in again)
    tables = [list(trace.state.cache.block_tables) for trace in again]
    assert tables == [list(trace.state.cache.block_tables) for trace in traces], "the order of tables too"


def test_an_empty_run_is_a_trace_too(tmp_path: Path) -> None:
    write_trace([], tmp_path / "run.json")
    assert read_trace(tmp_path / "run.json") == []


def test_every_64th_step_is_a_keyframe_and_can_be_read_alone(
    traces: list[StepTrace], written: Path, tmp_path: Path
) -> None:
    steps = json.loads(written.read_text())["steps"]
    assert [index for index, step in enumerate(steps) if step["keyframe"]] == [0, KEYFRAME_INTERVAL]
    write_trace(traces[KEYFRAME_INTERVAL:], tmp_path / "tail.json")
    assert json.loads((tmp_path / "tail.json").read_text())["steps"] == steps[KEYFRAME_INTERVAL:]


def test_a_step_between_keyframes_costs_what_changed_and_not_the_pool(written: Path) -> None:
    steps = json.loads(written.read_text())["steps"]
    sizes = [len(json.dumps(step["state"])) for step in steps]
    assert max(sizes[1:KEYFRAME_INTERVAL]) < sizes[0] / 3


def test_an_order_is_written_in_slices_of_the_one_before() -> None:
    for before, after, pieces in (
        ("abcdef", "abcdef", [[0, 6]]),
        ("abcdef", "cdef", [[2, 6]]),
        ("abcdef", "xabcdefy", ["x", [0, 6], "y"]),
        ("abcdef", "efab", [[4, 6], [0, 2]]),
        ("abcdef", "acf", ["a", "c", "f"]),
        ("", "ab", ["a", "b"]),
        ("ab", "", []),
    ):
        assert encode_order(before, after) == pieces
        assert "".join(decode_order(before, pieces)) == after


def damage(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        document = json.loads(text)
        change(document)
        return json.dumps(document)

    return apply


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[: len(text) // 2], "no trace, or only a part of one"),
        (lambda text: "", "no trace, or only a part of one"),
        (lambda text: "[]", "is no trace"),
        (lambda text: '{"format": "other"}', "is no trace"),
        (lambda text: text.replace('"a"', '"x"', 1), "checksum"),
        (damage(lambda d: d.update(version=1)), "has version 1"),
        (damage(lambda d: d.pop("version")), "has version None"),
        (damage(lambda d: d.pop("steps")), "checksum"),
        (damage(lambda d: d["steps"].pop()), "checksum"),
        (damage(lambda d: d["steps"][5].update(step=6)), "checksum"),
        (damage(lambda d: d.update(steps=["?"], sha256=_sha(["?"]))), "makes no sense"),
        (damage(lambda d: d.update(steps=d["steps"][1:], sha256=_sha(d["steps"][1:]))), "makes no sense"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_whole_trace_of_this_version_is_refused_in_one_sentence(
    written: Path, spoil: Callable[[str], str], words: str
) -> None:
    written.write_text(spoil(written.read_text()))
    with pytest.raises(ValueError, match=words) as error:
        read_trace(written)
    sentence = str(error.value)
    assert str(written) in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def _sha(steps: list[Any]) -> str:
    import hashlib

    lines = [json.dumps(step, separators=(",", ":")) for step in steps]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_bytes_that_are_no_text_and_a_missing_file_are_refused_too(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is no trace"):
        read_trace(tmp_path / "bytes")
    with pytest.raises(ValueError, match="Cannot read the trace"):
        read_trace(tmp_path / "missing")
