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
    disable_created_metrics,
    generate_latest,
)

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
FINISH_REASONS = ("stop", "length", "abort", "error")


class ServerMetrics:
    """Collects after each step (`observe`), and writes the text that Prometheus reads (`render`)."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._stats = CoreStats()
        self._last_token: dict[
            str, tuple[int, float]
        ] = {}  # request -> (tokens so far, when the last one came)
        self.running = self._gauge("num_requests_running", "Requests that run")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Held blocks as a share of all, 0 to 1")
        self.totals = {
            "prefix_cache_queries": self._counter(
                "prefix_cache_queries", "Tokens looked up in the prefix cache"
            ),
            "prefix_cache_hits": self._counter("prefix_cache_hits", "Tokens found in the prefix cache"),
            "num_preemptions": self._counter("num_preemptions", "Preemptions"),
            "prompt_tokens": self._counter("prompt_tokens", "Tokens of prompts"),
            "generation_tokens": self._counter("generation_tokens", "Generated tokens"),
        }
        self.success = Counter(
            "vllm:request_success",
            "Finished requests",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        for reason in FINISH_REASONS:  # a dashboard shows 0, not nothing
            self.success.labels(**self._labels, finished_reason=reason)
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS)
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between tokens of a request", TOKEN_BUCKETS
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean between tokens, by request", TOKEN_BUCKETS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", REQUEST_BUCKETS)
        self.queue = self._histogram(
            "request_queue_time_seconds", "Arrival to first admission", REQUEST_BUCKETS
        )
        self.decode = self._histogram("request_decode_time_seconds", "First to last token", REQUEST_BUCKETS)
        self.step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed by a step", STEP_BUCKETS
        )
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt", LENGTH_BUCKETS)
        self.output_length = self._histogram(
            "request_generation_tokens", "Tokens of an answer", LENGTH_BUCKETS
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"vllm:{name}", text, list(self._labels), registry=self.registry)
        return gauge.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"vllm:{name}", text, list(self._labels), registry=self.registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", text, list(self._labels), registry=self.registry, buckets=buckets
        )
        return histogram.labels(**self._labels)

    def observe(self, outputs: Sequence[RequestOutput], stats: CoreStats) -> None:
        """Take in what a step has brought."""
        self.running.set(stats.num_requests_running)
        self.waiting.set(stats.num_requests_waiting)
        self.kv_usage.set(stats.kv_cache_usage)
        for name, counter in self.totals.items():
            counter.inc(getattr(stats, name) - getattr(self._stats, name))
        self._stats = stats
        if stats.step_tokens:
            self.step_tokens.observe(stats.step_tokens)
        for seconds in stats.queue_times:
            self.queue.observe(seconds)
        now = time.perf_counter()
        for output in outputs:
            self._observe_tokens(output, now)
            if output.finished:
                self.finish(output)

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
        self.success.labels(**self._labels, finished_reason=reason).inc()
        self.prompt_length.observe(metrics.num_prompt_tokens)
        self.output_length.observe(metrics.num_output_tokens)
        if metrics.latency_s is None:
            return
        self.e2e.observe(metrics.latency_s)
        if metrics.ttft_s is not None:
            decode = metrics.latency_s - metrics.ttft_s
            self.decode.observe(decode)
            longest = max(len(completion.token_ids) for completion in output.outputs)
            if longest > 1:
                self.tpot.observe(decode / (longest - 1))

    def render(self) -> bytes:
        return generate_latest(self.registry)
