"""`twinfer bench serve` against a server whose tokens and pace are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fast.bench.serve import (
    LoadClient,
    LoadRequest,
    Objectives,
    Sample,
    closed_loop,
    open_loop,
    percentiles,
    read_requests,
    summarise,
    synthetic_requests,
)
from reference.contracts.protocols import Tier
from reference.frontend.cli import main
from reference.frontend.server.args import Limits, ServerArgs
from tests.server.processes import scripted_server

REQUESTS = [LoadRequest("x" * (3 + i), 4 + i) for i in range(6)]


def test_every_request_of_both_loops_is_sent_once_and_counted(tier: Tier) -> None:
    with scripted_server(tier, pause=0.002) as server:
        client = LoadClient(f"{server.url}/v1", extra={"ignore_eos": True})
        assert (client.model, client.max_model_len) == ("script", 1000)
        for samples in (open_loop(client, REQUESTS, 200.0, 0), closed_loop(client, REQUESTS, 2)):
            assert [s.error for s in samples] == [None] * 6
            assert sorted(s.output_tokens for s in samples) == [4, 5, 6, 7, 8, 9]
            assert sorted(s.prompt_tokens for s in samples) == [3, 4, 5, 6, 7, 8]
            assert all(s.first is not None and s.due < s.first <= s.last for s in samples)
            assert all(sum(s.gaps) <= s.latency - s.ttft for s in samples)
            result = summarise("load", samples, Objectives(e2e_ms=1e6))
            assert (result.requests, result.failed) == (6, 0)
            assert result.output_tokens_per_second == pytest.approx(39 / result.seconds)
            assert result.goodput == result.requests_per_second


def test_refused_requests_are_counted_as_failed_and_say_why(tier: Tier) -> None:
    args = ServerArgs(access_log=False, limits=Limits(max_queue_len=1))
    with scripted_server(tier, args, pause=0.02) as server:
        client = LoadClient(server.url)
        result = summarise("load", closed_loop(client, REQUESTS, 6), Objectives(ttft_ms=0.0))
    assert 0 < result.failed < 6
    assert result.goodput == 0
    assert "429" in str(result.first_error)


def test_percentiles_and_goodput_by_hand() -> None:
    assert percentiles([i / 1000 for i in range(1, 101)]) == pytest.approx((50, 90, 99))
    fast = Sample(due=1.0, first=1.1, last=1.5, gaps=[0.1, 0.3])
    assert (fast.ttft, fast.latency) == pytest.approx((0.1, 0.5))
    assert Objectives(ttft_ms=101, itl_ms=201, e2e_ms=501).are_met_by(fast)
    for missed in (Objectives(ttft_ms=99), Objectives(itl_ms=199), Objectives(e2e_ms=499)):
        assert not missed.are_met_by(fast)
    assert not Objectives(ttft_ms=1e9).are_met_by(Sample(due=0.0, error="x"))
    assert not Objectives()


def test_synthetic_lengths_depend_on_the_seed_and_stay_below_the_limit() -> None:
    first = synthetic_requests(200, 1, 512)
    assert first == synthetic_requests(200, 1, 512)
    assert first != synthetic_requests(200, 2, 512)
    second = synthetic_requests(200, 1, 512, load=1)
    assert [len(r.prompt.split()) for r in second] == [len(r.prompt.split()) for r in first]
    assert [r.max_tokens for r in second] == [r.max_tokens for r in first]
    starts = [
        {" ".join(r.prompt.split()[:16]) for r in load if r.prompt.count(" ") > 16}
        for load in (first, second)
    ]
    assert not starts[0] & starts[1]  # nothing for the prefix cache to find
    lengths = [len(request.prompt.split()) for request in first]
    assert 1 <= min(lengths) < 30 < max(lengths) <= 256
    assert max(request.max_tokens for request in first) <= 128


def test_requests_come_from_a_file_or_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"prompt": "b"}\n', encoding="utf-8")
    assert read_requests(path, 3) == [LoadRequest("a", 3), LoadRequest("b", 128), LoadRequest("a", 3)]
    for bad in ("", "[]", '{"text": "a"}', "{"):
        path.write_text(bad, encoding="utf-8")
        with pytest.raises(ValueError, match=r"load\.jsonl"):
            read_requests(path, 1)


def test_the_command_prints_a_row_a_load_and_saves_figures_and_plot(
    tier: Tier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "load.jsonl"
    prompts.write_text('{"prompt": "abc", "max_tokens": 5}\n', encoding="utf-8")
    with scripted_server(tier) as server:
        command = ["bench", "serve", "--base-url", server.url, "--num-prompts", "5", "--slo-ttft", "10000"]
        command += ["--input", str(prompts)]
        status = main([*command, "--request-rate", "50", "100", "--save", str(tmp_path / "out" / "serve")])
    assert status == 0
    printed = capsys.readouterr().out
    assert "5 of 5" in printed
    saved = json.loads((tmp_path / "out" / "serve.json").read_text("utf-8"))
    assert (saved["benchmark"], saved["model"]) == ("serve", "script")
    assert {"cpu", "cores"} < set(saved["machine"])
    assert [row["load"] for row in saved["loads"]] == ["50 requests/s", "100 requests/s"]
    assert all(row["goodput"] == row["requests_per_second"] > 0 for row in saved["loads"])
    assert all(0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] for row in saved["loads"])
    assert (tmp_path / "out" / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_a_load_of_which_nothing_came_back_is_shown_too(
    tier: Tier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_server(tier) as server:
        command = ["bench", "serve", "--base-url", server.url, "--num-prompts", "3", "--concurrency", "2"]
        status = main([*command, "--extra-body", '{"n": 0}', "--save", str(tmp_path / "serve")])
    assert status == 1
    assert "3 requests failed, the first one with: status 400" in " ".join(capsys.readouterr().out.split())
    (row,) = json.loads((tmp_path / "serve.json").read_text("utf-8"))["loads"]
    assert row["ttft_ms"] == {"p50": None, "p90": None, "p99": None}


def test_health_is_asked_for_while_the_server_is_kept_busy(
    tier: Tier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_server(tier) as server:
        command = ["bench", "health", "--base-url", server.url, "--seconds", "0.5"]
        assert main([*command, "--save", str(tmp_path / "health")]) == 0
    assert "Time until /health is answered" in capsys.readouterr().out
    rows = json.loads((tmp_path / "health.json").read_text("utf-8"))["disturbances"]
    assert [row["statuses"].keys() for row in rows[:4]] == [set(), {"400"}, {"400"}, {"400"}]
    assert rows[4]["statuses"].keys() <= {"0", "400", "431"}
    for row in rows:
        assert row["failed"] == 0
        assert row["asked"] > 0
        assert 0 < row["ms"]["p50"] <= row["ms"]["p99"] <= row["ms"]["max"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--base-url", "localhost"], "must look like http"),
        (["--base-url", "http://127.0.0.1:1"], "No server answers"),
        (["--request-rate", "1", "--concurrency", "1"], "not both"),
        (["--request-rate", "0"], "above 0"),
        (["--extra-body", "[]"], "JSON object"),
        (["--num-prompts", "0"], "at least 1"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.strip().splitlines()) == 1
