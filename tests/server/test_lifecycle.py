"""Life and death: starting, stopping, clients that go away, and processes that are killed."""

from __future__ import annotations

import asyncio
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.llm import LLM
from reference.frontend.server.args import ServerArgs
from reference.frontend.tiers import load_tier
from tests.server.processes import (
    ServerProcess,
    children,
    eventually,
    is_alive,
    running,
    scripted_server,
)


def streams(server: ServerProcess, count: int) -> list[Any]:
    client = server.client()
    opened = [
        client.completions.create(
            model="tiny", prompt=f"{i} times", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        for i in range(count)
    ]
    for stream in opened:
        next(iter(stream))
    return opened


def exhausts(stream: Any) -> BaseException | None:
    """Reads to the end; returns the error that came."""
    try:
        for _ in stream:
            pass
    except (openai.APIError, httpx2.HTTPError) as error:
        return error
    return None


def test_start_is_told_in_one_block_and_a_signal_ends_it_with_status_0(model: Path, tier_name: str) -> None:
    with running(model, tier_name, "--num-blocks", "40", "--block-size", "8", "--no-access-log") as server:
        banner = server.log
        assert f"Twinfer serves {model} (LlamaForCausalLM) on the {tier_name} tier." in banner
        assert "39 blocks of 8 tokens = 312 tokens" in banner
        assert f"Listening on {server.url}/v1" in banner
        engine = server.engine_pid
        assert server.stop() == 0
        assert not is_alive(engine)
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stream_may_finish_after_the_signal_and_nobody_new_is_let_in(model: Path, number: int) -> None:
    with running(model, "reference", "--served-model-name", "tiny") as server:
        (stream,) = streams(server, 1)
        server.process.send_signal(number)
        assert exhausts(stream) is None
        assert server.process.wait(10) == 0
        with pytest.raises(OSError, match="refused"):
            server.connect()


def test_what_is_not_finished_in_time_is_aborted_with_an_error_event(tier: Tier) -> None:
    with scripted_server(tier, ServerArgs(access_log=False, shutdown_timeout=0.1), pause=0.05) as server:
        stream = server.client().completions.create(model="script", prompt=[5], max_tokens=900, stream=True)
        next(iter(stream))
        loop = server.server.engine._reader.get_loop()
        loop.call_soon_threadsafe(server.server.stop)
        error = exhausts(stream)
        assert isinstance(error, openai.APIError)
        assert "shutting down" in str(error)
    assert server.core.scheduler.requests == {}


def health(server: ServerProcess) -> int:
    """By the plainest of clients: making one of httpx takes longer than the server may."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("attempt", range(10))
def test_b21_a_killed_engine_process_is_seen_by_everybody(model: Path, attempt: int) -> None:
    """Killed while nobody, somebody, or a crowd is served, in the middle of some step."""
    with running(model, "reference", "--served-model-name", "tiny") as server:
        opened = streams(server, attempt % 5)
        time.sleep(random.Random(attempt).random() / 10)
        with ThreadPoolExecutor(5) as pool:
            ends = [pool.submit(exhausts, stream) for stream in opened]
            os.kill(server.engine_pid, signal.SIGKILL)
            eventually(lambda: health(server) == 503, "/health says 503", 2)
            eventually(lambda: all(end.done() for end in ends), "all streams have ended", 5)
        errors = [end.result() for end in ends]
        # One that had come to its end before is no less sound than one that was told.
        assert all(error is None or "signal 9" in str(error) for error in errors)
        if attempt == 0:
            body = {"messages": [{"role": "user", "content": "x"}]}
            assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
            assert server.post("/v1/chat/completions", body).status_code == 503
            assert server.process.wait(15) == 1, "it ends by itself"
        assert server.stop() == 1


@pytest.mark.parametrize("attempt", range(10))
def test_a_killed_api_process_leaves_no_orphan(model: Path, attempt: int) -> None:
    with running(model, "reference", "--served-model-name", "tiny") as server:
        engine = server.engine_pid
        streams(server, attempt % 5)
        time.sleep(random.Random(attempt).random() / 10)
        server.process.kill()
        eventually(lambda: not is_alive(engine), "the engine process ends with the API process", 5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "/nowhere"], "was not found"),
        (["--port", "99999"], "port must be"),
        (["--nonsense"], "--nonsense"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-model-len", "100000"], "max_model_len"),
        (["--tier", "third"], "no tier"),
        (["--max-json-depth", "0"], "max_json_depth"),
    ],
)
def test_a_bad_option_is_one_sentence_and_status_2(model: Path, options: list[str], sentence: str) -> None:
    command = [sys.executable, "-m", "reference.frontend.cli", "serve", "--tier", "reference", "--port", "0"]
    defaults = [] if "--model" in options else ["--model", str(model)]
    done = subprocess.run([*command, *defaults, *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_port_that_is_taken_is_one_sentence_and_status_2(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "reference.frontend.cli",
            "serve",
            "--model",
            str(model),
            "--port",
            port,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"Cannot listen on 127.0.0.1 port {port}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# As users of vLLM have it in their scripts: `vllm serve MODEL ...`, and the module that `vllm serve` came from.
VLLM_LINE = ("--host", "0.0.0.0", "--enable-prefix-caching", "--max-num-batched-tokens", "8192")


@pytest.mark.parametrize(
    "program", [("reference.frontend.cli", "serve"), ("fast.entrypoints.openai.api_server",)]
)
def test_a_line_made_for_vllm_starts_the_server(model: Path, program: tuple[str, ...]) -> None:
    with running(model, "fast", *VLLM_LINE, program=program) as server:
        assert "on the fast tier" in server.log
        assert "8192 tokens a step" in server.log
        body = {"model": str(model), "prompt": "x", "max_tokens": 3, "ignore_eos": True}
        assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 3


def test_vllms_module_name_means_the_fast_tier() -> None:
    command = [sys.executable, "-m", "fast.entrypoints.openai.api_server", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "(default: fast)" in done.stdout
    assert "--max-queue-len" in done.stdout


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_goes_away_is_aborted_at_once(tier: Tier, streaming: bool, path: str) -> None:
    with scripted_server(tier, pause=0.005) as server:
        body: dict[str, Any] = {"max_tokens": 900, "stream": streaming, "n": 1}
        body |= (
            {"prompt": [5]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        )
        if streaming:
            with server.stream("POST", path, json=body) as response:
                lines = response.iter_lines()  # held: the connection is closed with it
                next(lines)
                assert server.core.scheduler.requests
        else:
            with pytest.raises(httpx2.ReadTimeout):
                httpx2.post(server.url + path, json=body, timeout=0.3)
        eventually(lambda: not server.core.scheduler.requests, "the request has left the engine", 1)
        eventually(lambda: server.core.scheduler.kv_cache_manager.usage == 0, "its blocks are free", 1)
        assert server.server.engine.num_unfinished_requests == 0
        eventually(
            lambda: server.metric('request_success_total{.*finished_reason="abort".*}') == 1, "it is counted"
        )


def test_a_client_that_does_not_read_holds_up_nobody(tier: Tier) -> None:
    with scripted_server(tier, config={"max_model_len": 4000, "num_usable_blocks": 3000}) as server:
        with server.connect() as silent:
            body = b'{"prompt": [5], "max_tokens": 3900, "stream": true, "logprobs": 1}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            silent.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            answer = server.post("/v1/completions", {"prompt": [6], "max_tokens": 200})
            assert answer.json()["usage"]["completion_tokens"] == 200
            eventually(
                lambda: not server.core.scheduler.requests, "the unread request is computed to its end", 30
            )
        eventually(server.is_idle, "nothing is left", 5)


def test_survivors_of_disconnecting_clients_get_their_exact_tokens(
    server: ServerProcess, tier_name: str
) -> None:
    count = 64
    rng = random.Random(0)
    leaves = {i: rng.randrange(1, 12) for i in rng.sample(range(count), count // 5)}
    prompts = [f"client {i} " * (1 + i % 4) for i in range(count)]
    oracle = LLM(load_tier(tier_name), model=server.model, enable_prefix_caching=False)
    params = [SamplingParams(seed=i, max_tokens=24, ignore_eos=True) for i in range(count)]
    expected = [
        oracle.generate(p, q, use_tqdm=False)[0].outputs[0] for p, q in zip(prompts, params, strict=True)
    ]

    async def one(client: openai.AsyncOpenAI, i: int) -> list[int] | None:
        stream = await client.completions.create(
            model="tiny",
            prompt=prompts[i],
            seed=i,
            max_tokens=24,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        tokens: list[int] = []
        async for chunk in stream:
            tokens += chunk.choices[0].token_ids  # type: ignore[attr-defined]
            if len(tokens) >= leaves.get(i, 99):
                await stream.close()
                return None
        return tokens

    async def run() -> list[list[int] | None]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, i) for i in range(count)))

    assert len(leaves) == 12
    for i, tokens in enumerate(asyncio.run(run())):
        assert tokens == (None if i in leaves else expected[i].token_ids)
    eventually(server.is_idle, "no block and no request is left", 5)


def test_the_engine_process_is_the_only_child(server: ServerProcess) -> None:
    assert len(children(server.process.pid)) == 1


def test_a_second_signal_does_not_wait(tier: Tier) -> None:
    with scripted_server(tier, ServerArgs(access_log=False, shutdown_timeout=60), pause=0.02) as server:
        stream = server.client().completions.create(model="script", prompt=[5], max_tokens=900, stream=True)
        next(iter(stream))
        loop = server.server.engine._reader.get_loop()
        reader = threading.Thread(target=exhausts, args=(stream,))
        reader.start()
        for _ in range(2):
            loop.call_soon_threadsafe(server.server.stop)
        reader.join(10)
        assert not reader.is_alive()
