"""/metrics: a dashboard made for vLLM finds every series it asks for, and the figures are true."""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from reference.contracts.protocols import Tier
from reference.frontend.server.args import ServerArgs
from tests.server.processes import ScriptedServer, eventually, scripted_server

# What vLLM's example dashboard for Grafana asks for (examples/online_serving/prometheus_grafana/grafana.json).
DASHBOARD = (
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket", "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count", "vllm:kv_cache_usage_perc", "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket", "vllm:request_success_total", "vllm:request_queue_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total", "vllm:iteration_tokens_total_bucket",
)  # fmt: skip


def samples(server: ScriptedServer) -> dict[str, float]:
    """Series -> value, summed over labels but those of a reason."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "script"
            assert sample.labels["engine"] == "0"
            reason = sample.labels.get("finished_reason")
            name = f"{sample.name}/{reason}" if reason else sample.name
            found[name] = found.get(name, 0) + sample.value
            found[sample.name] = found.get(sample.name, 0) + (sample.value if reason else 0)
    return found


def test_every_series_of_the_dashboard_is_there_before_the_first_request(tier: Tier) -> None:
    with scripted_server(tier) as server:
        found = samples(server)
        assert [name for name in DASHBOARD if name not in found] == []
        for reason in ("stop", "length", "abort", "error"):
            assert found[f"vllm:request_success_total/{reason}"] == 0


def test_figures_follow_the_requests(tier: Tier) -> None:
    with scripted_server(tier, config={"block_size": 4}, pause=0.002) as server:
        for _ in range(2):
            server.post("/v1/completions", {"prompt": list(range(5, 26)), "max_tokens": 6})
        server.post("/v1/completions", {"prompt": [5], "max_tokens": 9, "stop_token_ids": [1]})
        eventually(server.is_idle, "the engine is idle")
        found = samples(server)
        assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"] == 43
        assert found["vllm:prefix_cache_hits_total"] == 20
        assert found["vllm:generation_tokens_total"] == 21
        assert found["vllm:request_success_total/length"] == 3
        for name in (
            "time_to_first_token",
            "e2e_request_latency",
            "request_queue_time",
            "request_decode_time",
        ):
            assert found[f"vllm:{name}_seconds_count"] == 3
        assert found["vllm:inter_token_latency_seconds_count"] == 18
        between, total = "vllm:inter_token_latency_seconds_sum", "vllm:e2e_request_latency_seconds_sum"
        assert 0 < found[between] <= found[total]
        assert found["vllm:iteration_tokens_total_count"] == 21
        assert found["vllm:iteration_tokens_total_sum"] == 43 - 20 + 18
        assert found["vllm:request_generation_tokens_sum"] == 21


def test_gauges_show_who_runs_and_who_waits(tier: Tier) -> None:
    with scripted_server(tier, config={"max_num_seqs": 1, "block_size": 4}, pause=0.02) as server:
        client = server.client()
        streams = [client.completions.create(model="script", prompt=[5] * 8, max_tokens=500, stream=True)]
        next(iter(streams[0]))
        streams.append(client.completions.create(model="script", prompt=[6], max_tokens=500, stream=True))
        eventually(lambda: server.metric("num_requests_waiting") == 1, "the second one waits")
        assert server.metric("num_requests_running") == 1
        assert 0 < server.metric("kv_cache_usage_perc") < 0.2
        for stream in streams:
            stream.close()
        eventually(server.is_idle, "both are gone")
        assert samples(server)["vllm:request_success_total/abort"] == 2


def test_the_access_log_is_one_json_object_a_request(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", logger="twinfer"),
        scripted_server(tier, ServerArgs(shutdown_timeout=0)) as server,
    ):
        headers = {"X-Request-Id": "line-1"}
        server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 3, "user": "me"}, headers=headers)
        server.get("/no%0Awhere")
        eventually(lambda: len(caplog.records) >= 2, "both lines are written")
    lines = [
        re.sub("^request ", "", r.getMessage())
        for r in caplog.records
        if r.getMessage().startswith("request ")
    ]
    first, second = map(json.loads, lines)
    assert first["request_id"] == "line-1"
    assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/completions", 200)
    assert (first["prompt_tokens"], first["completion_tokens"], first["user"]) == (2, 3, "me")
    assert second["status"] == 404
    assert all("\n" not in line for line in lines)
