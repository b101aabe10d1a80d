"""Prometheus metrics under vLLM's names and labels, so that a dashboard made for vLLM works.

Counters of the engine core arrive as totals and are added as differences; what requests experience is measured here,
where their tokens become text. (Names: `vllm/v1/metrics/loggers.py`.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from reference.contracts.config import EngineConfig
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.core_messages import CoreStats
from reference.frontend.outputs import RequestOutput

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which says when it was made
PROMPT_SOURCES = ("local_compute", "local_cache_hit")
N_BUCKETS = (1, 2, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error")
# Totals of `CoreStats`, each a counter of the same name.
TOTALS = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache",
    "prefix_cache_hits": "Tokens found in the prefix cache",
    "num_preemptions": "Preemptions",
    "prompt_tokens": "Tokens of prompts",
    "generation_tokens": "Generated tokens",
}
DRAFT_TOTALS = {
    "num_drafts": "Times that the drafts of a request were checked",
    "num_draft_tokens": "Drafts that were checked",
    "num_accepted_tokens": "Drafts that were accepted",
}


class ServerMetrics:
    """Collects after each step (`observe`), and writes the text that Prometheus reads (`render`)."""

    def __init__(self, model_name: str, config: EngineConfig) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._labels = {"model_name": model_name, "engine": "0"}
        self._stats = CoreStats()
        # Request -> (tokens so far, when the last one came).
        self._last_token: dict[str, tuple[int, float]] = {}
        self.running = self._gauge("num_requests_running", "Requests that run")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Held blocks as a share of all, 0 to 1")
        self.totals = {name: self._counter(name, text) for name, text in TOTALS.items()}
        self.cached = self._counter("prompt_tokens_cached", "Tokens of prompts that the prefix cache had")
        self.by_source = self._counters(
            "prompt_tokens_by_source", "Tokens of prompts", "source", PROMPT_SOURCES
        )
        self.success = self._counters(
            "request_success", "Finished requests", "finished_reason", FINISH_REASONS
        )
        self.accepted_at: list[Counter] = []
        if config.speculative is not None:
            self._add_drafts(config.speculative.num_speculative_tokens)
        self._add_histograms()
        self._tell_cache_config(config)
        names = ["method", "status", "handler"]
        self.http_requests = Counter("http_requests", "Requests of HTTP", names, registry=self.registry)
        self.http_seconds = Histogram(
            "http_request_duration_seconds", "From a request to the end of its answer", ["method", "handler"],
            registry=self.registry, buckets=TTFT_BUCKETS,
        )  # fmt: skip

    def _add_histograms(self) -> None:
        add = self._histogram
        self.ttft = add("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS)
        self.itl = add("inter_token_latency_seconds", "Between tokens of a request", TOKEN_BUCKETS)
        self.tpot = add(
            "request_time_per_output_token_seconds", "Mean between tokens, by request", TOKEN_BUCKETS
        )
        self.e2e = add("e2e_request_latency_seconds", "Arrival to last token", REQUEST_BUCKETS)
        self.queue = add("request_queue_time_seconds", "Arrival to first admission", REQUEST_BUCKETS)
        self.prefill = add("request_prefill_time_seconds", "First admission to first token", REQUEST_BUCKETS)
        self.decode = add("request_decode_time_seconds", "First to last token", REQUEST_BUCKETS)
        self.inference = add(
            "request_inference_time_seconds", "First admission to last token", REQUEST_BUCKETS
        )
        self.step_tokens = add("iteration_tokens_total", "Tokens computed by a step", STEP_BUCKETS)
        self.prompt_length = add("request_prompt_tokens", "Tokens of a prompt", LENGTH_BUCKETS)
        self.computed = add(
            "request_prefill_kv_computed_tokens", "The same, without cached ones", LENGTH_BUCKETS
        )
        self.output_length = add("request_generation_tokens", "Tokens of an answer", LENGTH_BUCKETS)
        self.longest_output = add(
            "request_max_num_generation_tokens", "Tokens of the longest of n answers", LENGTH_BUCKETS
        )
        self.asked_n = add("request_params_n", "The parameter n", N_BUCKETS)
        self.asked_max_tokens = add("request_params_max_tokens", "The parameter max_tokens", LENGTH_BUCKETS)

    def _add_drafts(self, num_drafts: int) -> None:
        for name, text in DRAFT_TOTALS.items():
            self.totals[name] = self._counter(f"spec_decode_{name}", text)
        positions = tuple(map(str, range(num_drafts)))
        by_position = self._counters(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by their place", "position", positions
        )
        self.accepted_at = [by_position[position] for position in positions]

    def _tell_cache_config(self, config: EngineConfig) -> None:
        """A gauge that is always 1; what it says is in its labels."""
        cache = config.cache
        labels = {
            "block_size": cache.block_size,
            "num_gpu_blocks": cache.num_blocks,  # vLLM's name; on a CPU they are the CPU's
            "enable_prefix_caching": cache.enable_prefix_caching,
            "kv_cache_size_tokens": cache.block_size * cache.num_usable_blocks,
            "sliding_window": config.model.sliding_window,
            "engine": 0,
        }
        gauge = Gauge("vllm:cache_config_info", "The KV cache", list(labels), registry=self.registry)
        gauge.labels(**{name: str(value) for name, value in labels.items()}).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"vllm:{name}", text, list(self._labels), registry=self.registry)
        return gauge.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"vllm:{name}", text, list(self._labels), registry=self.registry)
        return counter.labels(**self._labels)

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """One for each value of a label, from the start: a dashboard shows 0, not nothing."""
        family = Counter(f"vllm:{name}", text, [*self._labels, label], registry=self.registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", text, list(self._labels), registry=self.registry, buckets=buckets
        )
        return histogram.labels(**self._labels)

    def count_params(self, params: SamplingParams) -> None:
        """What a request asks for, when it enters the engine."""
        self.asked_n.observe(params.n)
        if params.max_tokens is not None:
            self.asked_max_tokens.observe(params.max_tokens)

    def count_http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An answer of the server; `handler` is the address of a route, and "none" where there is none."""
        self.http_requests.labels(method, f"{status // 100}xx", handler).inc()
        self.http_seconds.labels(method, handler).observe(seconds)

    def observe(self, outputs: Sequence[RequestOutput], stats: CoreStats) -> None:
        """Take in what a step has brought."""
        self.running.set(stats.num_requests_running)
        self.waiting.set(stats.num_requests_waiting)
        self.kv_usage.set(stats.kv_cache_usage)
        self._add_totals(stats)
        if stats.step_tokens:
            self.step_tokens.observe(stats.step_tokens)
        for seconds in stats.queue_times.values():
            self.queue.observe(seconds)
        now = time.perf_counter()
        for output in outputs:
            self._observe_tokens(output, now)
            if output.finished:
                self.finish(output)

    def _add_totals(self, stats: CoreStats) -> None:
        before, self._stats = self._stats, stats
        for name, counter in self.totals.items():
            counter.inc(getattr(stats, name) - getattr(before, name))
        num_cached = stats.prefix_cache_hits - before.prefix_cache_hits
        self.cached.inc(num_cached)
        self.by_source["local_cache_hit"].inc(num_cached)
        self.by_source["local_compute"].inc(stats.prompt_tokens - before.prompt_tokens - num_cached)
        accepted = before.num_accepted_tokens_per_position or [0] * len(self.accepted_at)
        for counter, new, old in zip(
            self.accepted_at, stats.num_accepted_tokens_per_position, accepted, strict=False
        ):
            counter.inc(new - old)

    def _observe_tokens(self, output: RequestOutput, now: float) -> None:
        # The sequences of one request run side by side: the longest one tells how often it got a token.
        longest = max(len(completion.token_ids) for completion in output.outputs)
        before, then = self._last_token.get(output.request_id, (0, now))
        if longest <= before:
            return
        if before == 0:
            if output.metrics.ttft_s is not None:
                self.ttft.observe(output.metrics.ttft_s)
        else:
            self.itl.observe(now - then)
        self._last_token[output.request_id] = (longest, now)

    def finish(self, output: RequestOutput) -> None:
        """A request has ended, be it by a step or by an abort."""
        self._last_token.pop(output.request_id, None)
        metrics = output.metrics
        reasons = {completion.finish_reason or "" for completion in output.outputs}
        reason = next((name for name in ("error", "abort", "length") if name in reasons), "stop")
        self.success[reason].inc()
        longest = max(len(completion.token_ids) for completion in output.outputs)
        self.prompt_length.observe(metrics.num_prompt_tokens)
        self.output_length.observe(metrics.num_output_tokens)
        self.longest_output.observe(longest)
        if metrics.latency_s is None:
            return
        self.e2e.observe(metrics.latency_s)
        if metrics.ttft_s is None:
            return
        self.computed.observe(metrics.num_prompt_tokens - metrics.num_cached_tokens)
        decode = metrics.latency_s - metrics.ttft_s
        self.decode.observe(decode)
        if metrics.queue_s is not None:
            self.prefill.observe(metrics.ttft_s - metrics.queue_s)
            self.inference.observe(metrics.latency_s - metrics.queue_s)
        if longest > 1:
            self.tpot.observe(decode / (longest - 1))

    def render(self) -> bytes:
        return generate_latest(self.registry)
