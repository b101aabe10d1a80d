"""Random workloads on tiny random models: reference = fast = cold oracle.

The cold oracle is the same request alone on the reference tier: no cache, no chunks, no company, an ample pool.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.frontend.diff import compare_tiers
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, WorkloadRun, run_workload
from tests.tiny_models import make_tiny_llama

MODELS = (
    {"num_heads": 4, "num_kv_heads": 2, "tie": True},
    {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "tie": False},
    {"num_heads": 7, "num_kv_heads": 1, "head_dim": 12, "tie": True},
)
NUM_WORKLOADS = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [
        str(make_tiny_llama(root / str(i), seed=i, max_position=128, **shape))  # type: ignore[arg-type]
        for i, shape in enumerate(MODELS)
    ]


def make_workload(seed: int) -> Workload:
    """Few prompts over few tokens, so that prefixes are shared; a pool from "just fits one" to ample."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    longest = 60
    least = -(-longest // block_size) + 1
    chunked = rng.random() < 0.8
    config = {
        "block_size": block_size,
        "num_blocks": rng.choice([least, least + least // 4, 3 * least]),
        "max_num_seqs": rng.randint(2, 6),
        "max_num_batched_tokens": rng.choice([8, 24, 64]) if chunked else 128,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice([0, 0, 6]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "max_model_len": 128,
        "seed": seed,
    }
    rules = random.Random(f"rules of {seed}")  # apart, so that more rules leave the schedules as they are
    scored = random.Random(f"scored of {seed}")
    shared = [rng.randrange(2, 300) for _ in range(20)]
    requests = []
    for i in range(rng.randint(3, 8)):
        prompt = shared[: rng.randint(0, 20)] + [rng.randrange(2, 300) for _ in range(rng.randint(1, 16))]
        greedy = rng.random() < 0.4
        max_tokens = rng.randint(1, 24)
        requests.append(
            WorkloadRequest(
                f"r{i}",
                prompt_token_ids=tuple(prompt),
                arrival_step=rng.randint(0, 8),
                abort_step=rng.randint(9, 20) if rng.random() < 0.15 else None,
                priority=rng.randint(0, 2),
                cache_salt=rng.choice([None, None, "s"]),
                params=SamplingParams(
                    temperature=0.0 if greedy else rng.choice([0.5, 1.0, 1.5]),
                    top_k=rng.choice([0, 0, 1, 20]),
                    top_p=rng.choice([1.0, 1.0, 0.7]),
                    seed=100 * i,
                    n=rng.choice([1, 1, 1, 2, 4]),
                    max_tokens=max_tokens,
                    ignore_eos=rng.random() < 0.5,
                    prompt_logprobs=2 if scored.random() < 0.15 else None,
                    **random_rules(rules, max_tokens),
                ),
            )
        )
    return Workload(tuple(requests), config)


def random_rules(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """What happens to logits before temperature, and min_p: nothing for half of the requests, else several things."""
    rules: dict[str, Any] = {
        "min_p": rng.choice([0.02, 0.2]),
        "repetition_penalty": rng.choice([1.3, 0.8]),
        "presence_penalty": rng.choice([0.9, -0.5]),
        "frequency_penalty": rng.choice([0.6, -0.3]),
        "logit_bias": {rng.randrange(320): rng.uniform(-8, 8) for _ in range(4)},
        "allowed_token_ids": rng.sample(range(320), 150),
        "bad_words": rng.choice([["e", "to"], ["\u00ff"], ["an er"]]),
        "min_tokens": rng.randint(1, max_tokens),
    }
    chosen = rng.sample(sorted(rules), rng.choice([0, 0, 0, 1, 2, 5]))
    return {name: rules[name] for name in chosen}


def cold_output(model: str, request: WorkloadRequest, index: int) -> RequestOutput:
    """One of the n sequences, generated as a request of its own."""
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=model, enable_prefix_caching=False, max_model_len=128), load_tier("reference")
    )
    assert request.params.seed is not None
    params = replace(request.params, n=1, seed=request.params.seed + index)
    alone = Workload((WorkloadRequest("alone", prompt_token_ids=request.prompt_token_ids, params=params),))
    return run_workload(engine, alone)["alone"]


def own_logprobs(output: RequestOutput) -> list[float]:
    """Of the prompt's tokens from the second on; empty when nobody asked for them."""
    return [next(iter(table.values())).logprob for table in output.prompt_logprobs or () if table is not None]


class Paths(NamedTuple):
    """Which paths a workload took."""

    preempted: bool
    cached: bool
    aborted: bool
    copied: bool
    scored: bool


def run_one(model: str, seed: int, **changes: Any) -> Paths:
    """Compare both tiers, and each sequence with its cold oracle. `changes` replace engine options of the workload."""
    workload = make_workload(seed)
    workload = replace(workload, config={**workload.config, **changes})
    report = compare_tiers((load_tier("reference"), load_tier("fast")), model, workload)
    assert report.divergence is None, f"workload {seed}: {report.divergence}"
    assert report.excused == [], f"workload {seed}"
    num_copies = 0

    def count_copies(schedule: SchedulerOutput, _: ModelRunnerOutput) -> None:
        nonlocal num_copies
        num_copies += len(schedule.block_copies)

    args = EngineArgs(**{**workload.config, "model": model})
    engine = LLMEngine.from_engine_args(args, load_tier("fast"), on_step=count_copies)
    run = WorkloadRun(engine, workload)
    while not run.is_done:
        run.step()
        engine.engine_core.scheduler.check_integrity()
    aborted = scored = False
    for request in workload.requests:
        for output in run.finished[request.request_id].outputs:
            cold = cold_output(model, request, output.index)
            logprobs = own_logprobs(run.finished[request.request_id])
            if output.token_ids:  # an abort may come before the prompt is complete
                # Two tiers and other chunks: logits of these models differ by less than 1e-4, logprobs by twice that.
                assert logprobs == pytest.approx(own_logprobs(cold), abs=2e-4), f"workload {seed}"
            scored = scored or bool(logprobs)
            expected = cold.outputs[0].token_ids
            if output.finish_reason == "abort":
                aborted = True
                expected = expected[: len(output.token_ids)]
            assert output.token_ids == expected, (
                f"workload {seed}, {request.request_id}, sequence {output.index}"
            )
    assert not engine.engine_core.scheduler.snapshot().cache.block_tables, "blocks leaked"
    return Paths(report.num_preemptions > 0, report.num_cached_tokens > 0, aborted, num_copies > 0, scored)


def test_random_workloads_are_equal_on_both_tiers_and_to_the_cold_oracle(models: list[str]) -> None:
    paths = [run_one(models[seed % len(models)], seed) for seed in range(NUM_WORKLOADS)]
    # A run that never takes the interesting paths proves nothing.
    assert sum(path.preempted for path in paths) >= 0.3 * NUM_WORKLOADS
    assert sum(path.cached for path in paths) >= 0.3 * NUM_WORKLOADS
    assert sum(path.aborted for path in paths) >= 0.1 * NUM_WORKLOADS
    assert sum(path.copied for path in paths) >= 0.1 * NUM_WORKLOADS
    assert sum(path.scored for path in paths) >= 0.3 * NUM_WORKLOADS
    params = [request.params for seed in range(NUM_WORKLOADS) for request in make_workload(seed).requests]
    assert sum(each.changes_logits for each in params) >= 0.3 * len(params)


@pytest.mark.parametrize("num_prompt_tokens", [16, 32, 33, 48])
def test_b01_a_cached_prompt_gives_the_same_tokens_again(
    tmp_path: Path, tier_name: str, num_prompt_tokens: int
) -> None:
    model = str(make_tiny_llama(tmp_path))
    engine = LLMEngine.from_engine_args(EngineArgs(model=model), load_tier(tier_name))
    prompt = tuple(range(10, 10 + num_prompt_tokens))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = [
        run_workload(engine, Workload((WorkloadRequest(name, prompt_token_ids=prompt, params=params),)))[name]
        for name in ("first", "second")
    ]
    assert [output.num_cached_tokens for output in outputs] == [0, (num_prompt_tokens - 1) // 16 * 16]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_forced_preemption_gives_the_tokens_of_an_ample_pool(tmp_path: Path, tier_name: str) -> None:
    """The recipe of the case collection: P = 34, 35 new tokens, block size 16; 7 blocks preempt, 20 do not."""
    model = str(make_tiny_llama(tmp_path))
    params = SamplingParams(temperature=0, max_tokens=35, ignore_eos=True)
    workload = Workload(
        tuple(
            WorkloadRequest(f"r{i}", prompt_token_ids=tuple(range(10 + i, 44 + i)), params=params)
            for i in range(2)
        )
    )
    results = []
    for num_usable_blocks in (7, 20):
        engine = LLMEngine.from_engine_args(
            EngineArgs(model=model, num_blocks=num_usable_blocks + 1, max_model_len=100), load_tier(tier_name)
        )
        finished = run_workload(engine, workload)
        preemptions = sum(output.metrics.num_preemptions for output in finished.values())
        results.append(
            (preemptions, {name: output.outputs[0].token_ids for name, output in finished.items()})
        )
    (tight, tight_tokens), (ample, ample_tokens) = results
    assert tight > 0
    assert ample == 0
    assert tight_tokens == ample_tokens
    assert all(len(tokens) == 35 for tokens in tight_tokens.values())
