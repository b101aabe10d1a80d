"""What a client may not do, and what it is told: limits, keys, and the privacy of caches."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import openai
import pytest

from reference.contracts.protocols import Tier
from reference.frontend.core_messages import CoreStats
from reference.frontend.server.args import Limits, ServerArgs
from reference.frontend.server.body import exceeds_depth
from reference.frontend.server.middleware import KeyRing
from tests.server.processes import ScriptedServer, ServerProcess, eventually, scripted_server

LIMITS = Limits(max_body_bytes=100_000, max_json_depth=8, max_queue_len=2, max_sequences=4)


@pytest.fixture
def narrow(tier: Tier) -> Iterator[ScriptedServer]:
    """A server with narrow limits and an engine that takes its time."""
    args = ServerArgs(access_log=False, limits=LIMITS, shutdown_timeout=0)
    with scripted_server(tier, args, pause=0.01) as server:
        yield server


def raw(server: ScriptedServer, request: bytes) -> bytes:
    """The answer to bytes that no library would send; a server that has read enough may hang up on the rest."""
    answer = b""
    with server.connect() as connection, suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(request)
        while chunk := connection.recv(65536):
            answer += chunk
            if b"\r\n\r\n" in answer and b'"error"' in answer:
                break
    return answer


def test_a_body_that_is_too_large_is_refused_before_it_is_read(narrow: ScriptedServer) -> None:
    answer = raw(narrow, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 413")
    assert narrow.post("/v1/completions", {"prompt": "x" * 200_000}).status_code == 413


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(narrow: ScriptedServer) -> None:
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw(narrow, head + chunk * 4)
    assert answer.startswith(b"HTTP/1.1 413")
    assert narrow.get("/health").status_code == 200


def test_json_that_is_nested_too_deeply_is_refused(narrow: ScriptedServer) -> None:
    for body in (b"[" * 40_000, b'{"prompt":' * 9_000, b'{"prompt": ' + b"[" * 8 + b"]" * 8 + b"}"):
        response = narrow.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert "8 levels deep" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("[]", 1), ("[[1], {}]", 2), ('["[[["]', 1), (r'["\"[[["]', 1), (r'["\\", [[]]]', 3), ("[" * 9, 9),
        ("[]" * 9, 1), ('"' + "[" * 9, 0), (r"\[[", 1),
    ],
)  # fmt: skip
def test_depth_counts_brackets_outside_of_strings(text: str, depth: int) -> None:
    assert exceeds_depth(text.encode(), depth - 1) or depth == 0
    assert not exceeds_depth(text.encode(), depth)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"prompt": "x"} x', b'{"prompt": NaN}', b"null"]
)
def test_what_is_no_json_object_is_refused(narrow: ScriptedServer, content: bytes) -> None:
    response = narrow.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_only_json_is_understood(narrow: ScriptedServer) -> None:
    response = narrow.post("/v1/completions", data={"prompt": "x"})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_large_headers_and_many_headers_are_refused(narrow: ScriptedServer) -> None:
    assert narrow.get("/health", headers={"X-Large": "x" * 17_000}).status_code == 431
    assert narrow.get("/health", headers={f"X-{i}": "x" for i in range(120)}).status_code == 431
    answer = raw(narrow, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * 2**20)
    assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert narrow.get("/health").status_code == 200


def test_methods_and_addresses_that_do_not_exist_are_errors_of_the_same_shape(narrow: ScriptedServer) -> None:
    for response, status in (
        (narrow.get("/v1/completions"), 405),
        (narrow.post("/v1/embeddings", {}), 404),
        (narrow.get("/docs"), 404),
        (narrow.post("/reset_prefix_cache"), 404),
        (narrow.get("/v1/trace/steps"), 404),
    ):
        assert response.status_code == status
        assert response.json()["error"]["code"] == status


def test_too_many_completions_of_one_request_are_refused(narrow: ScriptedServer) -> None:
    for body in ({"prompt": [[5], [6], [7]], "n": 2}, {"prompt": [[5]] * 5}, {"prompt": [5], "n": 5}):
        response = narrow.post("/v1/completions", body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "n"


def test_a_full_queue_says_when_to_come_back(narrow: ScriptedServer) -> None:
    client = narrow.client()
    streams = [
        client.completions.create(model="script", prompt=[5], max_tokens=400, stream=True) for _ in range(2)
    ]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="script", prompt=[5], max_tokens=2)
    assert caught.value.response.headers["retry-after"] == "1"
    for stream in streams:
        stream.close()
    eventually(narrow.is_idle, "the streams that were closed leave the engine", 5)
    assert client.completions.create(model="script", prompt=[5], max_tokens=2).usage is not None


def test_a_crowd_that_comes_at_once_is_counted_while_it_is_tokenized(tier: Tier) -> None:
    args = ServerArgs(access_log=False, limits=Limits(max_queue_len=3))
    with scripted_server(tier, args, pause=0.05) as server:
        engine = server.server.engine
        encode, most = engine.tokenizer.encode, 0

        def slowly(text: str) -> list[int]:
            time.sleep(0.05)
            return encode(text)

        def watch(outputs: object, stats: CoreStats) -> None:
            nonlocal most
            most = max(most, stats.num_requests_running + stats.num_requests_waiting)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.tokenizer, "encode", slowly)
            engine.on_news = watch
            body = {"prompt": "x", "max_tokens": 4}
            with ThreadPoolExecutor(12) as pool:
                answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(12)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert 1 <= most <= 3
        assert server.post("/v1/completions", {"prompt": [[5]] * 4, "max_tokens": 1}).status_code == 429
        assert server.post("/v1/completions", {"prompt": [[5]] * 3, "max_tokens": 1}).status_code == 200


def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it(tier: Tier) -> None:
    with scripted_server(tier) as server:
        tokenizer = server.server.engine.tokenizer
        text = "x" * (1000 * tokenizer.longest_token + 1)
        response = server.post("/v1/completions", {"prompt": text})
        assert response.status_code == 400
        assert f"{len(text)} characters" in response.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": text}]}
        assert server.post("/v1/chat/completions", chat).status_code == 400


def test_the_server_answers_while_large_bodies_and_long_texts_are_worked_on(tier: Tier) -> None:
    with scripted_server(tier) as server:
        texts = [
            json.dumps({"prompt": "word " * 20_000}),
            '{"prompt": "' + "x" * 8_000_000 + '"}',
            "[[]," * 1_000_000,
        ]
        headers = {"content-type": "application/json"}
        threads = [
            threading.Thread(
                target=server.post, args=("/v1/completions",), kwargs={"content": text, "headers": headers}
            )
            for text in texts
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert server.get("/health").status_code == 200
        for thread in threads:
            thread.join()


def test_request_ids_are_kept_if_they_are_short_and_visible(narrow: ScriptedServer) -> None:
    assert narrow.get("/health", headers={"X-Request-Id": "a" * 128}).headers["x-request-id"] == "a" * 128
    for bad in ("a" * 129, "with space", "", b"\xc3\xa4"):
        name = narrow.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert len(name) == 32
        assert name.isalnum()


@pytest.fixture
def guarded(tier: Tier) -> Iterator[ScriptedServer]:
    args = ServerArgs(api_keys=("alpha", "beta"), access_log=False, enable_dev_endpoints=True)
    with scripted_server(tier, args, config={"block_size": 4}) as server:
        yield server


def test_everything_but_health_needs_a_key(guarded: ScriptedServer) -> None:
    assert guarded.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/v1/trace/steps", "/nowhere"):
        response = guarded.get(path)
        assert response.status_code == 401, path
        assert response.json()["error"]["type"] == "authentication_error"
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/reset_prefix_cache",
    ):
        assert guarded.post(path, {}).status_code == 401, path
    for header in ("Bearer gamma", "Bearer", "alpha", "Basic alpha", "Bearer alphabeta"):
        assert guarded.get("/version", headers={"Authorization": header}).status_code == 401, header
    for key in ("alpha", "beta"):
        assert guarded.get("/version", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        guarded.client("gamma").models.list()


def cached_tokens(server: ScriptedServer, key: str, salt: str | None = None) -> int:
    extra: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
    answer = server.client(key).completions.create(
        model="script", prompt=list(range(5, 26)), max_tokens=1, extra_body=extra
    )
    assert answer.usage is not None
    return answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[attr-defined, no-any-return]


def test_one_key_cannot_find_out_what_another_has_cached(guarded: ScriptedServer) -> None:
    assert cached_tokens(guarded, "alpha") == 0
    assert cached_tokens(guarded, "alpha") == 20
    assert cached_tokens(guarded, "beta") == 0
    assert cached_tokens(guarded, "beta") == 20
    # A salt in the body divides a key's own cache further; it never opens another's.
    assert cached_tokens(guarded, "beta", "key 0:") == 0
    assert cached_tokens(guarded, "beta", "key 0:") == 20
    assert cached_tokens(guarded, "alpha", "key 0:") == 0


def test_salts_of_keys_cannot_meet_salts_of_bodies() -> None:
    ring = KeyRing(["alpha", "beta"])
    salts = {(ring.salt(key) or "") + body for key in (0, 1) for body in ("", "key 0:", "0:", "1:")}
    assert len(salts) == 8
    assert KeyRing(["alpha"]).salt(0) is None
    assert not KeyRing([])


def test_other_origins_are_let_in_only_if_they_were_named(tier: Tier) -> None:
    ask = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    with scripted_server(tier) as server:
        assert "access-control-allow-origin" not in server.get("/version", headers=ask).headers
    args = ServerArgs(allowed_origins=("http://a.example",), api_keys=("k",), access_log=False)
    with scripted_server(tier, args) as server:
        preflight = server.send("OPTIONS", "/v1/completions", headers=ask)
        assert preflight.headers["access-control-allow-origin"] == "http://a.example"
        other = server.send("OPTIONS", "/v1/completions", headers=ask | {"Origin": "http://b.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "port"),
        ({"shutdown_timeout": -1}, "shutdown_timeout"),
        ({"api_keys": ("",)}, "API key"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerArgs(**options)
    with pytest.raises(ValueError, match="max_queue_len"):
        Limits(max_queue_len=0)


def test_the_prefix_cache_can_be_reset_where_that_is_enabled(server: ServerProcess) -> None:
    body = {"prompt": "reset me " * 8, "max_tokens": 1}

    def cached() -> int:
        usage = server.post("/v1/completions", body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert server.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0
