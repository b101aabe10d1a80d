"""Whole engines with speculation: both tiers in lockstep, and the tokens of the same engine without it."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.frontend.diff import compare_tiers
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.metrics import Metrics
from reference.frontend.outputs import CompletionOutput
from reference.frontend.tiers import load_tier
from reference.frontend.tokenizer import load_tokenizer
from reference.frontend.workload import Workload, WorkloadRequest, WorkloadRun
from tests.speculation import RightUntil, always_right
from tests.tiny_models import make_tiny_llama
from tests.workloads import TINY, make_workload

NUM_WORKLOADS = 8  # of each kind
SHORT = replace(TINY, stretches=(0,))  # of a few workloads, enough then swap


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, and a smaller `draft` of another seed."""
    root = tmp_path_factory.mktemp("models")
    make_tiny_llama(root / "target", max_position=128)
    make_tiny_llama(root / "draft", max_position=128, num_layers=1, num_heads=2, num_kv_heads=1, seed=9)
    return root


def speculative(folder: Path, proposer: str, k: int) -> dict[str, Any]:
    if proposer == "ngram":
        return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1}
    # A pool that is short now and then.
    return {
        "method": "draft_model", "model": str(folder / proposer), "num_speculative_tokens": k, "num_blocks": 150,
    }  # fmt: skip


def run(
    folder: Path,
    tier: Tier,
    workload: Workload,
    on_step: Callable[[SchedulerOutput, ModelRunnerOutput], None] | None = None,
    prepare: Callable[[Any], None] | None = None,
    **options: Any,
) -> tuple[dict[str, list[CompletionOutput]], Metrics]:
    """Outputs by request, and the engine's figures; `prepare` may change the model runner."""
    args = EngineArgs(**{**workload.config, "model": str(folder / "target"), **options})
    engine = LLMEngine.from_engine_args(args, tier, on_step)
    executor: Any = engine.engine_core.executor
    if prepare is not None:
        prepare(executor.model_runner)
    run = WorkloadRun(engine, workload)
    while not run.is_done:
        run.step()
        engine.engine_core.scheduler.check_integrity()
    speculator = executor.model_runner.speculator
    if hasattr(speculator, "block_pool"):
        speculator.block_pool.check_integrity()
    outputs = {
        # How text was cut into deltas is another thing where steps give several tokens.
        name: [replace(completion, delta_text="") for completion in output.outputs]
        for name, output in run.finished.items()
    }
    return outputs, engine.metrics.snapshot()


def comparable(workload: Workload) -> Workload:
    """An abort strikes at another token when steps give several, and logprobs are equal but for their last bits."""
    requests = (
        replace(r, abort_step=None, params=replace(r.params, logprobs=None)) for r in workload.requests
    )
    return replace(workload, requests=tuple(requests))


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("proposer", ["ngram", "draft", "target"])
def test_random_workloads_have_the_same_schedule_on_both_tiers_and_the_tokens_of_no_speculation(
    folder: Path, proposer: str, k: int
) -> None:
    """Through preemptions of both modes, cache hits, chunks, aborts, siblings and every sampling rule."""
    preempted = cached = copied = checked = accepted = swapped = 0
    for seed in range(NUM_WORKLOADS):
        workload = make_workload(seed, SHORT)
        workload.config.pop("speculative", None)
        if seed % 2:
            workload = replace(workload, config={**workload.config, "preemption_mode": "swap"})
        options = {"speculative": speculative(folder, proposer, k)}
        report = compare_tiers(
            (load_tier("reference"), load_tier("fast")), str(folder / "target"), workload, **options
        )
        assert report.divergence is None, f"workload {seed}: {report.divergence}"
        assert report.excused == [], f"workload {seed}"

        workload = comparable(workload)
        cold, _ = run(folder, load_tier("fast"), workload)
        outputs, metrics = run(folder, load_tier("fast"), workload, **options)
        assert outputs == cold, f"workload {seed}"
        preempted += metrics.num_preemptions
        swapped += metrics.num_swapped_in_blocks
        cached += metrics.prefix_cache_hits
        copied += metrics.num_block_copies
        checked += metrics.num_draft_tokens
        accepted += metrics.num_accepted_tokens
    assert min(preempted, swapped, cached, copied, checked) > 0
    if proposer == "target":  # as its own draft model it is always right
        assert accepted == checked
    else:
        assert 0 < accepted < checked


def long_requests(max_tokens: int | None, num_requests: int = 4, **params: Any) -> Workload:
    return Workload(
        tuple(
            WorkloadRequest(
                f"r{i}",
                prompt_token_ids=tuple(2 + (7 * i + 11 * j) % 300 for j in range(25 + 3 * i)),
                params=SamplingParams(
                    temperature=0.0 if i % 2 else 0.8,
                    seed=i,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    **params,
                ),
            )
            for i in range(num_requests)
        ),
        {"block_size": 4, "max_model_len": 100},
    )


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("proposer", ["ngram", "target"])
def test_b31_drafts_never_reach_past_the_length_limit(
    folder: Path, tier: Tier, proposer: str, k: int
) -> None:
    """L = 100, prompts of 25 to 34 tokens, max_tokens = 100: every sequence ends with exactly 100 tokens."""
    lengths = {f"r{i}": 25 + 3 * i for i in range(4)}
    num_checked = 0

    def watch(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        nonlocal num_checked
        for name, drafts in schedule.scheduled_spec_decode_tokens.items():
            assert 1 <= len(drafts) <= min(k, 100 - lengths[name] - 1)
            num_checked += 1
        for name, token_ids in output.sampled_token_ids.items():
            lengths[name] += len(token_ids)
        for name, drafts in output.draft_token_ids.items():
            assert len(drafts) <= min(k, max(100 - lengths[name] - 1, 0)), "proposed beyond the limit"

    workload = long_requests(100)
    cold, _ = run(folder, tier, workload)
    outputs, _ = run(folder, tier, workload, watch, speculative=speculative(folder, proposer, k))
    assert outputs == cold
    assert set(lengths.values()) == {100}
    assert num_checked > 0
    for (completion,) in outputs.values():
        assert completion.finish_reason == "length"


def letters(folder: Path, **params: Any) -> Workload:
    """One greedy request that can say nothing but small letters, and `more_ids`."""
    tokenizer = load_tokenizer(folder / "target")
    small = [i for i in range(2, 258) if tokenizer.decode([i]) in string.ascii_lowercase]
    allowed = [*small, *params.pop("more_ids", ())]
    defaults = {"allowed_token_ids": allowed, "frequency_penalty": 2.0, "max_tokens": 16}
    request = WorkloadRequest(
        "a",
        prompt_token_ids=tuple(range(30, 40)),
        params=SamplingParams(temperature=0, **{**defaults, **params}),
    )
    return Workload((request,), {"block_size": 4, "max_model_len": 100})


def with_right_drafts(cold: list[int]) -> Callable[[Any], None]:
    def prepare(runner: Any) -> None:
        runner.speculator = always_right({"a": cold})

    return prepare


@pytest.mark.parametrize("include", [False, True])
def test_b33_a_stop_string_inside_an_accepted_run_ends_text_and_ids_there(
    folder: Path, tier: Tier, include: bool
) -> None:
    """The first step gives token 0, the second tokens 1 to 4; the stop string ends with token 2."""
    free, _ = run(folder, tier, letters(folder))
    (whole,) = free["a"]
    assert len(whole.text) == 16
    stop = whole.text[1:3]
    assert whole.text.index(stop) == 1
    workload = letters(folder, stop=stop, include_stop_str_in_output=include)
    cold, _ = run(folder, tier, workload)
    outputs, _ = run(
        folder,
        tier,
        workload,
        prepare=with_right_drafts(whole.token_ids),
        speculative=speculative(folder, "ngram", 3),
    )
    (completion,) = outputs["a"]
    assert outputs == cold
    assert completion.token_ids == whole.token_ids[:3]
    assert completion.text == whole.text[: 3 if include else 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("end", ["max_tokens", "stop_token_ids", "eos"])
def test_b33_nothing_behind_the_end_inside_an_accepted_run_is_kept(
    folder: Path, tier: Tier, end: str
) -> None:
    """The first step gives token 0; the request ends with the third token of those that the second accepts."""
    free, _ = run(folder, tier, letters(folder))
    answer = free["a"][0].token_ids
    assert answer[3] not in answer[:3]
    changes: dict[str, dict[str, Any]] = {
        "max_tokens": {"max_tokens": 4},
        "stop_token_ids": {"stop_token_ids": [answer[3]]},
        # Token 1 is end-of-sequence: forbidden three times, and then forced.
        "eos": {"more_ids": [1], "min_tokens": 3, "logit_bias": {1: 100}},
    }
    workload = letters(folder, **changes[end])
    cold, _ = run(folder, tier, workload)
    sampled: list[int] = []

    def watch(_: SchedulerOutput, output: ModelRunnerOutput) -> None:
        sampled.append(len(output.sampled_token_ids["a"]))

    answer = [*answer[:3], 1, 1, 1] if end == "eos" else answer
    options = {"speculative": speculative(folder, "ngram", 4)}
    outputs, _ = run(folder, tier, workload, watch, with_right_drafts(answer), **options)
    assert outputs == cold
    (completion,) = outputs["a"]
    assert completion.token_ids == answer[:4]
    assert completion.finish_reason == ("length" if end == "max_tokens" else "stop")
    # Drafts are cut where max_tokens ends the request; a stop is only found when the run is taken in.
    assert sampled == ([1, 3] if end == "max_tokens" else [1, 5])


@pytest.mark.parametrize("num_right", [0, 2, 10**9])
def test_whole_engines_with_scripted_proposers_give_the_tokens_of_no_speculation(
    folder: Path, tier: Tier, num_right: int
) -> None:
    """A pool so small that requests are preempted in the middle of their drafts."""
    workload = long_requests(40)
    workload = replace(workload, config={**workload.config, "num_blocks": 40, "max_num_batched_tokens": 16})
    cold, _ = run(folder, tier, workload)
    answers = {name: completion.token_ids for name, (completion,) in cold.items()}

    def prepare(runner: Any) -> None:
        runner.speculator = RightUntil(answers, num_right)

    outputs, metrics = run(
        folder, tier, workload, prepare=prepare, speculative=speculative(folder, "ngram", 4)
    )
    assert outputs == cold
    assert metrics.num_preemptions > 0
    per_position = metrics.num_accepted_tokens_per_position
    assert [count > 0 for count in per_position] == [j < num_right for j in range(4)]
    if num_right > 4:
        assert metrics.draft_acceptance_rate == 1.0


def test_requests_with_logprobs_report_one_entry_for_each_token_of_an_accepted_run(
    folder: Path, tier: Tier
) -> None:
    workload = long_requests(20, logprobs=2)
    cold, _ = run(folder, tier, workload)
    outputs, metrics = run(folder, tier, workload, speculative=speculative(folder, "target", 3))
    assert metrics.num_accepted_tokens > 0
    for name, (completion,) in outputs.items():
        (expected,) = cold[name]
        assert completion.token_ids == expected.token_ids
        assert completion.logprobs is not None
        assert expected.logprobs is not None
        assert [list(entry) for entry in completion.logprobs] == [list(entry) for entry in expected.logprobs]


def test_a_workload_file_may_ask_for_speculation(folder: Path, tier: Tier) -> None:
    """The config line is JSON, and so is the table in it."""
    plain = long_requests(16)
    table = speculative(folder, "draft", 2)
    _, metrics = run(folder, tier, replace(plain, config={**plain.config, "speculative": table}))
    assert metrics.num_drafts > 0
