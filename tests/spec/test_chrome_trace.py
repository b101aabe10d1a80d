"""The timeline follows the Trace Event Format, and every request's track tells its story."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from reference.frontend.chrome_trace import chrome_events, write_chrome_trace
from reference.frontend.tiers import load_tier
from tests.spec.test_engine_core import request, run
from tests.spec.test_trace import make_core

Event = dict[str, Any]


def make_events() -> list[Event]:
    """a and b outgrow the pool, so b is preempted; c waits for a slot; d is aborted while it waits."""
    core = make_core(
        load_tier("reference"), block_size=4, num_usable_blocks=5, caching=False, max_num_seqs=2,
        max_num_batched_tokens=6,
    )  # fmt: skip
    for arrival, name in enumerate("abcd"):
        core.add_request(request(name, 4, arrival=arrival, max_tokens=8))
    core.step()
    core.step()
    core.abort_requests(["d"])
    run(core)
    return chrome_events(core.traces)


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return make_events()


def track(events: list[Event], name: str) -> list[Event]:
    """Spans and marks of a request, in order of time."""
    (tid,) = [e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == name]
    return sorted((e for e in events if e["ph"] in "Xi" and e["tid"] == tid), key=lambda e: e["ts"])


def test_every_event_has_the_fields_of_its_phase(events: list[Event]) -> None:
    assert {event["ph"] for event in events} == {"M", "X", "C", "i"}
    for event in events:
        assert isinstance(event["name"], str)
        assert event["pid"] == 1
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] == "t"


def test_a_request_that_is_preempted_shows_all_its_states(events: list[Event]) -> None:
    names = [event["name"] for event in track(events, "b")]
    assert names[:2] == ["prefill 2", "prefill 2"], (
        "four prompt tokens, behind the four of a, in a budget of six"
    )
    preempted = names.index("preempted")
    assert set(names[2:preempted]) == {"decode"}
    assert names[preempted + 1].startswith("prefill ")
    assert names[-1] == "finished: length"
    (wait,) = [event for event in track(events, "b") if event["name"] == "preempted"]
    assert "preempted b: b needed 1 block, 0 free, b arrived last" in wait["args"]["reasons"]


def test_a_request_without_a_slot_is_queued_from_its_first_step_and_says_why(events: list[Event]) -> None:
    first, second, *_ = track(events, "c")
    assert first["name"] == "queued"
    assert "c waits: max_num_seqs is 2" in first["args"]["reasons"]
    assert second["name"].startswith("prefill ")
    assert first["ts"] + first["dur"] == pytest.approx(second["ts"], abs=0.01)


def test_a_request_that_ends_in_the_queue_stops_waiting_there(events: list[Event]) -> None:
    assert [event["name"] for event in track(events, "d")] == ["queued", "finished: abort"]


def test_spans_of_one_track_follow_each_other(events: list[Event]) -> None:
    for name in ("steps", *"abcd"):
        spans = [event for event in track(events, name) if event["ph"] == "X"]
        for earlier, later in pairwise(spans):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 0.01


def test_counters_follow_the_blocks_and_the_budget(events: list[Event]) -> None:
    blocks = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "KV blocks"]
    budget = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "token budget"]
    assert blocks[0] == {"held": 2, "free": 3}
    assert all(sum(value.values()) == 5 for value in blocks)
    assert budget[0] == {"used": 6, "unused": 0}
    assert all(sum(value.values()) == 6 for value in budget)


def test_the_file_is_one_json_object_with_the_events(tmp_path: Path) -> None:
    core = make_core(load_tier("reference"))
    core.add_request(request("a", 4, max_tokens=3))
    run(core)
    write_chrome_trace(core.traces, tmp_path / "run.chrome.json")
    document = json.loads((tmp_path / "run.chrome.json").read_text())
    assert document == {"displayTimeUnit": "ms", "traceEvents": chrome_events(core.traces)}


def test_what_still_waits_when_the_recording_ends_waits_until_then() -> None:
    core = make_core(load_tier("reference"), max_num_seqs=1)
    core.add_request(request("a", 4, max_tokens=9))
    core.add_request(request("b", 4, arrival=1, max_tokens=9))
    core.step()
    core.step()
    (wait,) = track(chrome_events(core.traces), "b")
    end = 1e6 * (core.traces[-1].started + core.traces[-1].seconds)
    assert wait["name"] == "queued"
    assert wait["ts"] + wait["dur"] == pytest.approx(end, abs=0.01)
