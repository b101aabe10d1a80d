"""One stopwatch for every benchmark: a workload on a real engine, in this process, with the times of each token."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fast.bench.workloads import BenchWorkload, prompts_of
from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine


@dataclass
class Timed:
    """One request. Times are in seconds, from the moment it was handed to the engine."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between its tokens
    error: str | None = None


@dataclass(frozen=True)
class Run:
    """What one workload took."""

    seconds: float
    num_steps: int
    requests: tuple[Timed, ...]
    sequences: tuple[tuple[int, ...], ...]  # prompt and answer of the last wave

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def num_cached_tokens(self) -> int:
        return sum(request.num_cached_tokens for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, the time of the prompts included."""
        return self.num_output_tokens / self.seconds


def make_engine(args: EngineArgs, tier: Tier) -> LLMEngine:
    """An engine that has done its first steps.

    Raises:
        ValueError: as `LLMEngine.from_engine_args`.
    """
    return warm_up(LLMEngine.from_engine_args(args, tier))


def warm_up(engine: LLMEngine) -> LLMEngine:
    """The same engine, silent, its buffers there and the pages of its KV cache mapped, as after a while of work."""
    engine.log_stats = False
    for layer in engine.engine_core.executor.model_runner.kv_caches:  # type: ignore[attr-defined]
        for cache in layer:
            cache[:] = 0
    engine.add_request("warm-up", {"prompt_token_ids": [1] * 16}, _params(4))
    while engine.has_unfinished_requests():
        engine.step()
    return engine


def run_workload(engine: LLMEngine, workload: BenchWorkload) -> Run:
    """Run a workload on a cold prefix cache. Greedy, and no end of a sequence ends it early.

    Raises:
        ValueError: a request does not fit the model, or ended with an error.
    """
    engine.engine_core.scheduler.kv_cache_manager.reset_prefix_cache()
    timed: list[Timed] = []
    sequences: list[list[int]] = []
    num_steps = 0
    started = time.perf_counter()
    for wave in workload.waves:
        prompts = prompts_of(wave, sequences)
        requests = {str(i): Timed(len(prompt)) for i, prompt in enumerate(prompts)}
        sent = time.perf_counter()
        for name, prompt in zip(requests, prompts, strict=True):
            max_tokens = wave[int(name)].max_tokens
            engine.add_request(name, {"prompt_token_ids": prompt}, _params(max_tokens))
        answers, steps = _step_until_done(engine, requests, sent)
        num_steps += steps
        timed += requests.values()
        sequences = [[*prompt, *answers[name]] for name, prompt in zip(requests, prompts, strict=True)]
    seconds = time.perf_counter() - started
    failed = next((request.error for request in timed if request.error is not None), None)
    if failed is not None:
        raise ValueError(f"A request of the workload {workload.name} failed: {failed}")
    return Run(seconds, num_steps, tuple(timed), tuple(map(tuple, sequences)))


def _step_until_done(
    engine: LLMEngine, requests: dict[str, Timed], sent: float
) -> tuple[dict[str, list[int]], int]:
    """(generated ids of each request, steps it took)."""
    answers: dict[str, list[int]] = {}
    last = dict.fromkeys(requests, sent)
    num_steps = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        num_steps += 1
        now = time.perf_counter()
        for output in outputs:
            request, completion = requests[output.request_id], output.outputs[0]
            answers[output.request_id] = completion.token_ids
            if len(completion.token_ids) > request.num_output_tokens:
                if request.num_output_tokens:
                    request.gaps.append(now - last[output.request_id])
                else:
                    request.ttft = now - sent
                request.num_output_tokens = len(completion.token_ids)
                last[output.request_id] = now
            if output.finished:
                request.latency = now - sent
                request.num_cached_tokens = output.metrics.num_cached_tokens
                request.error = output.error
    return answers, num_steps


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds, by nearest rank; 0 of nothing."""
    ranked = sorted(seconds) or [0.0]
    return {f"p{p}": 1e3 * ranked[math.ceil(len(ranked) * p / 100) - 1] for p in (50, 90, 99)}
