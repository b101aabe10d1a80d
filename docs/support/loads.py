"""Load on an engine, in seconds and in steps: docs/measuring.md."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import numpy as np

from docs.support.engines import engine
from docs.support.runs import Arrival, make_core, request_of
from reference.contracts.sampling_params import SamplingParams

OUTPUT = 24  # tokens of each answer


@dataclass(frozen=True)
class Batch:
    """So many equal requests at once."""

    requests: int
    seconds: float
    first_token: float  # of the slowest request, seconds

    @property
    def tokens_per_second(self) -> float:
        return self.requests * OUTPUT / self.seconds

    @property
    def tokens_per_second_each(self) -> float:
        return OUTPUT / self.seconds


@cache
def batch(requests: int) -> Batch:
    """Prompts of 16 tokens that share nothing, on the fast tier; the better of two runs."""
    llm = engine("fast", enable_prefix_caching=False, num_blocks=129)
    prompts = [{"prompt_token_ids": [1000 + 17 * i + j for j in range(16)]} for i in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    best: Batch | None = None
    for _ in range(2):
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        if best is None or seconds < best.seconds:
            best = Batch(requests, seconds, max(output.metrics.ttft_s or 0.0 for output in outputs))
    assert best is not None
    return best


@dataclass(frozen=True)
class Queue:
    """Latencies in steps, from arrival to last token, of requests in the order of their arrival."""

    latencies: np.ndarray  # int64 [requests]

    @property
    def mean(self) -> float:
        return float(self.latencies.mean())

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.latencies, percent))


class _Clock:
    """An engine that makes a step a tick, also when there is nothing to do. Eight requests run at once, with answers of
    ten tokens: at most 0.8 a step can be served."""

    def __init__(self) -> None:
        self.core = make_core(blocks=64, budget=64, max_num_seqs=8, caching=False)
        self.now = 0
        self.sent: dict[str, int] = {}
        self.latencies: dict[str, int] = {}

    def send(self) -> str:
        number = len(self.sent)
        name = f"r{number:04}"
        self.sent[name] = self.now
        self.core.add_request(request_of(Arrival(name, [number, 1, 2, 3], 10), (number, 0)))
        return name

    def tick(self) -> list[str]:
        """Names of those that ended in this step."""
        num_traces = len(self.core.traces)
        self.core.step()
        self.now += 1
        ended = [name for trace in self.core.traces[num_traces:] for name in trace.finished]
        for name in ended:
            self.latencies[name] = self.now - self.sent[name]
        return ended


@cache
def open_loop(rate: float, requests: int = 1500, seed: int = 0) -> Queue:
    """Requests come at random moments, `rate` a step on average, whether or not others have been answered."""
    moments = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests))
    clock = _Clock()
    while len(clock.latencies) < requests:
        while len(clock.sent) < requests and moments[len(clock.sent)] <= clock.now:
            clock.send()
        clock.tick()
    return Queue(np.array([clock.latencies[name] for name in clock.sent]))


@cache
def closed_loop(clients: int, requests: int = 400) -> Queue:
    """So many clients, each of which sends its next request when it has its answer."""
    clock = _Clock()
    for _ in range(clients):
        clock.send()
    while len(clock.latencies) < requests:
        for _ in clock.tick():
            clock.send()
    return Queue(
        np.array([clock.latencies[name] for name in list(clock.sent)[:requests] if name in clock.latencies])
    )
