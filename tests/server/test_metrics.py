"""/metrics: a dashboard made for vLLM finds every series it asks for, and the figures are true."""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from reference.contracts.config import SpeculativeConfig
from reference.contracts.protocols import Tier
from reference.frontend.server.args import ServerArgs
from tests.server.processes import ScriptedServer, eventually, scripted_server

# What vLLM's dashboards for Grafana ask for (examples/observability in its repository), and what its metrics page lists
# for one engine without adapters, images and other servers' caches (docs/usage/metrics.md).
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "iteration_tokens_total",
    "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens", "request_params_n", "request_params_max_tokens",
)  # fmt: skip
DASHBOARD = (
    *(f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")),
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_requests_running",
    "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:request_success_total",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
    "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_by_source_total/local_compute",
    "vllm:prompt_tokens_by_source_total/local_cache_hit", "vllm:cache_config_info",
    "process_resident_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds",
)  # fmt: skip
DRAFTS = (
    "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total/0",
)  # fmt: skip


def samples(server: ScriptedServer) -> dict[str, float]:
    """Series -> value, summed over labels; once more by reason, source or position where there is such a label."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("vllm:") and sample.name != "vllm:cache_config_info":
                assert sample.labels["model_name"] == "script"
                assert sample.labels["engine"] == "0"
            found[sample.name] = found.get(sample.name, 0) + sample.value
            for label in ("finished_reason", "source", "position"):
                if label in sample.labels:
                    found[f"{sample.name}/{sample.labels[label]}"] = sample.value
    return found


def test_every_series_of_the_dashboard_is_there_before_the_first_request(tier: Tier) -> None:
    with scripted_server(tier) as server:
        found = samples(server)
        assert [name for name in DASHBOARD if name not in found] == []
        for reason in ("stop", "length", "abort", "error"):
            assert found[f"vllm:request_success_total/{reason}"] == 0
        assert not any("spec_decode" in name for name in found)
        assert 'num_gpu_blocks="1001"' in server.get("/metrics").text


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
        assert found["vllm:prompt_tokens_by_source_total/local_cache_hit"] == 20
        assert found["vllm:prompt_tokens_by_source_total/local_compute"] == 23
        assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 23
        for name in HISTOGRAMS:
            if name not in ("inter_token_latency_seconds", "iteration_tokens_total"):
                assert found[f"vllm:{name}_count"] == 3, name
        assert found["vllm:inter_token_latency_seconds_count"] == 18
        between, total = "vllm:inter_token_latency_seconds_sum", "vllm:e2e_request_latency_seconds_sum"
        assert 0 < found[between] <= found[total]
        assert found["vllm:iteration_tokens_total_count"] == 21
        assert found["vllm:iteration_tokens_total_sum"] == 43 - 20 + 18
        assert found["vllm:request_generation_tokens_sum"] == 21
        assert found["vllm:request_params_max_tokens_sum"] == 21


def test_the_times_of_a_request_add_up(tier: Tier) -> None:
    with scripted_server(tier, config={"max_num_seqs": 1}, pause=0.01) as server:
        # Three requests in one body: they arrive together, as three bodies need not.
        answer = server.post("/v1/completions", {"prompt": [[5], [5], [5]], "max_tokens": 6})
        assert answer.status_code == 200
        found = samples(server)

    def total(name: str) -> float:
        return found[f"vllm:{name}_seconds_sum"]

    queue, prefill, decode = (total(f"request_{name}_time") for name in ("queue", "prefill", "decode"))
    # The second waited for the six steps of the first, and the third for twelve: 0.18 s, less what they came later.
    assert queue > 0.1
    assert prefill > 0.03
    assert decode > 0.15
    assert total("request_inference_time") == pytest.approx(prefill + decode)
    assert total("e2e_request_latency") == pytest.approx(queue + prefill + decode)
    assert total("time_to_first_token") == pytest.approx(queue + prefill)


def test_the_parameters_that_were_asked_for_are_counted(tier: Tier) -> None:
    with scripted_server(tier) as server:
        server.post("/v1/completions", {"prompt": [[5], [6]], "max_tokens": 3})
        server.post(
            "/v1/completions", {"prompt": [5], "max_tokens": 0}
        )  # refused: it never got into the engine
        found = samples(server)
        assert (found["vllm:request_params_n_count"], found["vllm:request_params_n_sum"]) == (2, 2)
        assert found["vllm:request_params_max_tokens_sum"] == 6
        assert found["vllm:request_max_num_generation_tokens_sum"] == 6
        assert found["vllm:request_generation_tokens_sum"] == 6


def test_drafts_are_counted_where_there_is_speculation(tier: Tier) -> None:
    config = {"speculative": SpeculativeConfig("ngram", 3)}
    with scripted_server(tier, config=config, num_drafts=3) as server:
        server.post("/v1/completions", {"prompt": [5], "max_tokens": 9})
        found = samples(server)
        assert [name for name in (*DASHBOARD, *DRAFTS) if name not in found] == []
        drafts, tokens = (found[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens"))
        assert 2 <= drafts <= tokens <= 8
        assert (
            found["vllm:spec_decode_num_accepted_tokens_total"] == tokens
        )  # the script's drafts are all right
        assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == tokens
        assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total/0"] == drafts


def test_answers_are_counted_by_route_and_status(tier: Tier) -> None:
    with scripted_server(tier) as server:
        server.get("/v1/models/script")
        server.get("/v1/models/other")
        server.get("/nowhere")
        server.send("BREW", "/health")
        text = server.get("/metrics").text
    for method, status, handler in (
        ("GET", "2xx", "/v1/models/{name:path}"),
        ("GET", "4xx", "/v1/models/{name:path}"),
        ("GET", "4xx", "none"),
        ("other", "4xx", "/health"),
    ):
        labels = f'{{handler="{handler}",method="{method}",status="{status}"}}'
        assert f"http_requests_total{labels} 1.0" in text
    assert 'http_request_duration_seconds_count{handler="/v1/models/{name:path}",method="GET"} 2.0' in text


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
