"""Watching a server: a real one on a scripted engine, and false ones that say what a server can say wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import app.live
from app.live import LiveRun, Sight, live_lesson, watch
from app.presets import preset
from app.runs import record
from app.state import make_page, make_view, unknown_tokens
from app.step_stream import Address, Head
from reference.frontend.server.args import ServerArgs
from reference.frontend.tiers import load_tier
from reference.frontend.trace_file import FORMAT, VERSION, encode_step
from tests.server.processes import ScriptedServer, scripted_server

HEAD = {
    "format": FORMAT,
    "version": VERSION,
    "model": "m",
    "tier": "reference",
    "block_size": 4,
    "num_blocks": 41,
}
DONE = "[DONE]"


@contextmanager
def server_to_watch(num_usable_blocks: int = 1000, **options: Any) -> Iterator[ScriptedServer]:
    args = ServerArgs(access_log=False, enable_dev_endpoints=True, shutdown_timeout=0, **options)
    with scripted_server(
        load_tier("reference"), args, {"trace": True, "num_usable_blocks": num_usable_blocks}, pause=0.01
    ) as server:
        yield server


@contextmanager
def generating(server: ScriptedServer, max_tokens: int, key: str = "") -> Iterator[None]:
    """Two requests are served meanwhile."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": [7] * 40, "max_tokens": max_tokens, "ignore_eos": True}
    threads = [
        threading.Thread(target=lambda: server.post("/v1/completions", body, headers=headers), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def until(sights: Iterator[Sight | None], is_it: Callable[[Sight], bool], seconds: float = 20) -> list[Sight]:
    """All there is to see up to the first that is it."""
    seen, deadline = [], time.monotonic() + seconds
    for sight in sights:
        assert time.monotonic() < deadline, [s.sentence for s in seen]
        if sight is not None:
            seen.append(sight)
            if is_it(sight):
                return seen
    raise AssertionError([s.sentence for s in seen])


def lengths(seen: list[Sight]) -> dict[str, int]:
    """By run: the steps it had in the end."""
    return {sight.key: len(sight.run.traces) for sight in seen if sight.run is not None}


@contextmanager
def false_server(*answers: tuple[int, str, list[str]]) -> Iterator[str]:
    """One answer a connection: status, type, and what is sent as events; the last one again and again."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, events = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            for content in events:
                self.wfile.write(f"data: {content}\n\n".encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def stream_of(key: str, first: int, last: int) -> list[str]:
    """Head and steps of a preset's run."""
    traces = record("x", preset(key).workload(0)).traces[first:last]
    return [json.dumps(HEAD), *map(encode_step, traces)]


def test_the_steps_of_a_server_are_seen_as_they_come_with_their_texts() -> None:
    with server_to_watch() as server:
        sights = watch(server.url)
        until(sights, lambda sight: "connected; no step yet" in sight.sentence)
        with generating(server, max_tokens=30):
            seen = until(sights, lambda s: s.run is not None and len(s.run.traces) >= 30)
        sights.close()  # type: ignore[attr-defined]
    run = seen[-1].run
    assert run is not None
    assert not run.is_done
    assert (run.info.tier, run.info.model, run.info.block_size) == ("reference", "script", 4)
    numbers = [trace.step for trace in run.traces]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len({sight.key for sight in seen if sight.run is not None}) == 1
    view = make_page([run], live_lesson(run))["runs"][0]
    assert [request["unknown"] for request in view["requests"]] == [40, 40]  # the prompts
    assert view["settings"] is None
    sampled = {i for trace in run.traces for ids in trace.sampled_token_ids.values() for i in ids}
    assert sampled <= run.info.pieces.keys()
    assert not any(piece.startswith(" #") for piece in view["pieces"])


def test_a_server_with_a_key_is_watched_with_the_key_alone() -> None:
    with server_to_watch(api_keys=("secret",)) as server:
        (*_, last) = filter(None, watch(server.url))
        assert last == Sight(f"The server at {server.url} wants its API key.", is_error=True)
        sights = watch(server.url, "secret")
        until(sights, lambda sight: "connected" in sight.sentence)
        with generating(server, 5, "secret"):
            until(sights, lambda sight: sight.run is not None)
        sights.close()  # type: ignore[attr-defined]


def test_a_server_without_the_endpoint_is_told_from_no_server() -> None:
    with scripted_server(load_tier("reference")) as server:
        (*_, last) = filter(None, watch(server.url))
    assert last.sentence == (
        f"The server at {server.url} shows no steps; start one with `twinfer serve --enable-dev-endpoints`."
    )
    (*_, last) = filter(None, watch(server.url))  # it has stopped
    assert last.is_error
    assert last.sentence.startswith(f"Nobody answers at {server.url}; start one with")


@pytest.mark.parametrize(
    ("status", "kind", "events", "sentence"),
    [
        (200, "text/html", ["<html>"], "is no twinfer server (status 200)"),
        (302, "text/html", [], "is no twinfer server (status 302)"),
        (200, "text/event-stream", ["hello"], "sends what is no trace"),
        (200, "text/event-stream", ['{"id": 1}'], "sends what is no trace (its first event does not say so)"),
        (200, "text/event-stream", [json.dumps({**HEAD, "version": 99})], "version 99 of the format"),
        (200, "text/event-stream", [json.dumps({"format": FORMAT, "version": VERSION})], "lacks 'model'"),
        (200, "text/event-stream", [json.dumps(HEAD), '{"step": 1}'], "a step that makes no sense"),
    ],
)
def test_what_is_no_server_is_given_up_with_a_sentence(
    status: int, kind: str, events: list[str], sentence: str
) -> None:
    with false_server((status, kind, events)) as url:
        (*_, last) = filter(None, watch(url))
    assert last.is_error
    assert sentence in last.sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is no address"),
        ("ftp://127.0.0.1", "is no address"),
        ("http://127.0.0.1:port", "is no address"),
        ("http://[::1", "is no address"),
        ("http:///v1", "is no address"),
        ("http://192.0.2.1:8000", "192.0.2.1 is another machine"),
        ("http://127.0.0.1.example.org", "127.0.0.1.example.org is another machine"),
        ("http://127.0.0.1@example.org", "example.org is another machine"),
    ],
)
def test_only_addresses_of_this_machine_are_watched(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        next(watch(text))


def test_an_address_needs_no_scheme_and_may_be_any_of_the_loopback() -> None:
    assert Address.parse(" 127.0.0.1:8000/v1 ").url == "http://127.0.0.1:8000"
    assert Address.parse("localhost:81").url == "http://localhost:81"
    assert Address.parse("https://[::1]:8000").url == "https://[::1]:8000"
    assert Address.parse("http://192.0.2.1", allow_remote=True).url == "http://192.0.2.1"


def test_a_stream_that_breaks_off_is_taken_up_again_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app.live, "DELAYS_S", (0.01,) * 5)
    first, second = stream_of("chunked", 0, 5), stream_of("chunked", 5, 12)
    events = "text/event-stream"
    with false_server((200, events, first), (200, events, [*second, DONE]), (404, "text/plain", [])) as url:
        seen = list(filter(None, watch(url)))
    again = [sight.sentence for sight in seen if "Trying again" in sight.sentence]
    assert again == [f"The server at {url} has ended the stream. Trying again (1 of 5)."] * 2
    assert list(lengths(seen).values()) == [12]
    assert seen[-1].sentence.startswith(f"The server at {url} shows no steps")


def test_a_server_that_has_begun_anew_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.live, "DELAYS_S", (0.01,) * 5)
    events = "text/event-stream"
    answer = (200, events, stream_of("chunked", 0, 5))
    with false_server(answer, answer, (404, "text/plain", [])) as url:
        seen = list(filter(None, watch(url)))
    assert list(lengths(seen).values()) == [5, 5]


def test_a_server_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.live, "DELAYS_S", (0.01, 0.01))
    with false_server((200, "text/event-stream", stream_of("chunked", 0, 2))) as url:
        sights = watch(url)
        until(sights, lambda sight: sight.run is not None)
    seen = [sight.sentence for sight in sights if sight is not None]
    again = [sentence.rpartition(". ")[2] for sentence in seen if "Trying" in sentence]
    assert again == ["Trying again (1 of 2).", "Trying again (2 of 2)."]
    assert seen[-1].startswith("Nobody answers at")


def test_owners_keep_letter_and_colour_while_others_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.live, "MAX_STEPS", 4)
    live, texts = LiveRun("u"), app.live.Texts(Address.parse("127.0.0.1:1"), "")
    live.begin(Head("m", "reference", 4, 33))
    numbers: dict[str, int | None] = {}
    for trace in record("x", preset("continuous").workload(1)).traces:
        live.add(trace)
        requests = live.run(texts).info.requests
        for request in requests:
            assert numbers.setdefault(request.request_id, request.number) == request.number
    assert len(requests) < 8
    assert sorted(filter(None, numbers.values())) == list(range(1, 8))


def test_the_window_slides_and_times_are_told_only_of_those_whose_arrival_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app.live, "MAX_STEPS", 6)
    live = LiveRun("u")
    live.begin(Head("m", "reference", 4, 33))
    traces = record("x", preset("continuous").workload(1)).traces
    for trace in traces[2:16]:
        live.add(trace)
    run = live.run(app.live.Texts(Address.parse("127.0.0.1:1"), ""))
    assert [trace.step for trace in run.traces] == list(range(10, 16))
    assert live.sight().sentence.startswith(f"Watching {live.url}: the last 6 of 14 steps; ")
    assert live.sight().zh.startswith(f"正在观看 {live.url}：14 步中的最近 6 步；")
    view = make_view(run)
    rows = {request["id"]: request for request in view["requests"]}
    assert rows["ben"]["arrival"] == -1
    assert "latency_steps" not in rows["ben"]
    assert rows["ben"]["end"] == 13 - 10
    assert view["steps"][0]["n"] == 10


def test_the_length_of_a_prompt_is_found_out_from_a_trace_that_does_not_tell_it() -> None:
    run = record("x", preset("preemption").workload(1))
    prompts = {request.request_id: len(request.prompt_token_ids) for request in run.info.requests}
    assert unknown_tokens(run) == prompts
