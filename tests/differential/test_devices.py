"""The fast engine on its other devices: the CUDA kernels under the emulator give the tokens of the reference tier."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fast import kernels
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput
from reference.frontend.async_core import AsyncEngineCore
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.diff import DiffReport, compare_tiers
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, run_workload
from tests.architectures import ARCHITECTURES
from tests.devices import DEVICE
from tests.tiny_models import make_tiny_llama, make_tiny_model

TIERS = (load_tier("reference"), load_tier("fast"))


def compare(model: Path, *requests: WorkloadRequest, **options: Any) -> DiffReport:
    """Both tiers in lockstep, the fast one on the emulator: schedule, tables, tokens and logits of every step."""
    config = {"max_model_len": 100, "block_size": 8, **options}
    report = compare_tiers(TIERS, str(model), Workload(requests, config), device=DEVICE)
    assert report.is_equal, report.divergence
    assert not report.excused
    assert report.num_finished == len(requests)
    return report


def request(name: str, length: int, max_tokens: int = 6, first: int = 10, **params: Any) -> WorkloadRequest:
    return WorkloadRequest(
        name,
        prompt_token_ids=tuple(range(first, first + length)),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params),
    )


def test_greedy_and_drawn_tokens_are_those_of_the_reference(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    compare(
        tmp_path,
        request("greedy", 21, temperature=0),
        request("drawn", 3, first=50, temperature=0.9, seed=3),
        request("filtered", 9, first=90, temperature=1.1, seed=4, top_k=30, top_p=0.9, min_p=0.01),
    )


def test_a_prompt_in_chunks_and_a_hit_in_the_prefix_cache(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    again = request("again", 30, temperature=0.7, seed=2)
    report = compare(
        tmp_path,
        request("long", 30, temperature=0.7, seed=1),
        WorkloadRequest(
            "again", prompt_token_ids=again.prompt_token_ids, params=again.params, arrival_step=5
        ),
        max_num_batched_tokens=12,
    )
    assert report.num_cached_tokens == 24


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_go_on_with_the_same_tokens(tmp_path: Path, mode: str) -> None:
    make_tiny_llama(tmp_path)
    report = compare(
        tmp_path,
        *(request(f"r{i}", 14, max_tokens=12, first=10 + 20 * i, temperature=0.8, seed=i) for i in range(2)),
        num_blocks=6,
        preemption_mode=mode,
        enable_prefix_caching=False,
    )
    assert report.num_preemptions > 0
    assert bool(report.num_swapped_blocks) == (mode == "swap")


def test_siblings_copy_a_shared_block_before_they_write_to_it(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    report = compare(tmp_path, request("two", 11, temperature=1.0, seed=9, n=2))
    assert report.num_block_copies == 1


def test_penalties_masks_and_biases_apply(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    compare(
        tmp_path,
        request(
            "penalties", 7, 12, temperature=0.5, seed=1, repetition_penalty=1.3, presence_penalty=0.4,
            frequency_penalty=0.6,
        ),
        request(
            "masks", 7, temperature=1.0, seed=1, allowed_token_ids=list(range(40, 80)),
            logit_bias={45: 3.0, 300: 9.0}, min_tokens=3,
        ),
    )  # fmt: skip


def test_guessed_tokens_are_verified_as_on_the_cpu(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    prompt = (*range(10, 18), *range(10, 18))
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    compare(
        tmp_path,
        WorkloadRequest("repeats", prompt_token_ids=prompt, params=params),
        speculative={"method": "ngram", "num_speculative_tokens": 3},
    )


def test_a_step_planned_while_another_runs_on_the_device_changes_no_token_and_no_schedule(
    tmp_path: Path,
) -> None:
    """The device works in another thread than the plan is made in. All requests end by their length."""
    make_tiny_llama(tmp_path)
    requests = [request("greedy", 21, 9, temperature=0), request("drawn", 11, 5, first=50, seed=3)]
    runs = []
    for tier, device, is_async in [
        ("reference", "cpu", False),
        ("fast", DEVICE, False),
        ("fast", DEVICE, True),
    ]:
        args = EngineArgs(
            str(tmp_path), device=device, max_model_len=100, block_size=8, async_scheduling=is_async
        )
        engine = LLMEngine.from_engine_args(args, load_tier(tier))
        assert isinstance(engine.engine_core, AsyncEngineCore) is is_async
        steps = note_plans(engine)
        finished = run_workload(engine, Workload(tuple(requests)))
        tokens = {name: output.outputs[0].token_ids for name, output in finished.items()}
        runs.append((tokens, [step for step in steps if step]))
    assert {name: len(tokens) for name, tokens in runs[0][0].items()} == {"greedy": 9, "drawn": 5}
    assert runs[0] == runs[1] == runs[2]


def note_plans(engine: LLMEngine) -> list[dict[str, int]]:
    """Filled with the tokens of each request in each step that the scheduler plans."""
    scheduler: Any = engine.engine_core.scheduler  # type: ignore[attr-defined]
    schedule, plans = scheduler.schedule, []

    def note() -> Any:
        output = schedule()
        plans.append(dict(output.num_scheduled_tokens))
        return output

    scheduler.schedule = note
    return plans


@pytest.mark.parametrize(
    "name", ["gpt2", "qwen3", "biases everywhere", "mistral, window of 8", "yarn, new form, untied"]
)
def test_every_kind_of_layer_runs_on_the_device(tmp_path: Path, name: str) -> None:
    make_tiny_model(tmp_path, seed=1, **ARCHITECTURES[name])
    compare(
        tmp_path,
        request("a", 19, temperature=0.8, seed=1),
        request("b", 3, first=60, temperature=0),
        max_num_batched_tokens=16,
    )


def test_bfloat16_gives_nearly_the_same_logits_in_half_the_memory(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    rows = {}
    for device, dtype in (("cpu", "float32"), (DEVICE, "bfloat16")):
        args = EngineArgs(str(tmp_path), device=device, dtype=dtype, max_model_len=64, keep_logits=True)
        seen: list[ModelRunnerOutput] = []
        engine = LLMEngine.from_engine_args(args, load_tier("fast"), lambda _, output: seen.append(output))  # noqa: B023
        engine.add_request("r", list(range(10, 30)), SamplingParams(max_tokens=1))
        engine.step()
        assert seen[0].logits is not None
        rows[dtype] = seen[0].logits["r"][0]
    # Logits of a standard deviation of 3.5, of numbers rounded to 8 bits in each of some 20 operations.
    assert 1e-3 < np.abs(rows["bfloat16"] - rows["float32"]).max() < 0.5
    blocks = [
        EngineArgs(str(tmp_path), dtype=dtype, kv_cache_memory=2**20)
        .create_engine_config(load_checkpoint(tmp_path).config, DEVICE)
        .cache.num_blocks
        for dtype in ("float32", "bfloat16")
    ]
    assert blocks[1] == 2 * blocks[0]


@pytest.mark.parametrize(
    ("tier", "options", "message"),
    [
        (
            "reference",
            {"device": "simt"},
            "reference tier computes in float32 on the CPU, not in float32 on 'simt'",
        ),
        ("fast", {"device": "cpu", "dtype": "bfloat16"}, "The CPU computes in float32 alone"),
    ],
)
def test_a_device_or_dtype_that_a_tier_lacks_is_refused_in_one_sentence(
    tmp_path: Path, tier: str, options: dict[str, str], message: str
) -> None:
    make_tiny_llama(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLMEngine.from_engine_args(EngineArgs(str(tmp_path), **options), load_tier(tier))  # type: ignore[arg-type]


def test_a_gpu_that_cannot_be_used_is_refused_in_one_sentence_and_auto_takes_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_llama(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_tier("fast").default_device() == "cpu"
    with pytest.raises(
        ValueError, match=r"device 'cuda' cannot be used here\. (The kernels|Torch sees no GPU)"
    ):
        LLMEngine.from_engine_args(EngineArgs(str(tmp_path), device="cuda"), load_tier("fast"))


@pytest.mark.parametrize("reason", [None, "There is none."])
def test_auto_takes_a_gpu_that_can_be_used(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    monkeypatch.setattr("fast.tier.find_spec", lambda name: name)
    monkeypatch.setattr(kernels, "why_no_gpu", lambda: reason)
    assert load_tier("fast").default_device() == ("cpu" if reason else "cuda")


def test_the_functions_of_a_device_are_those_of_the_cpu() -> None:
    """`kernels.using` puts one in place of the other: same names, same parameters."""

    def parameters(function: Callable[..., Any]) -> list[str]:
        return [name for name in inspect.signature(function).parameters if name != "self"]

    functions = [
        f for f in vars(kernels).values() if hasattr(f, "__wrapped__") and f.__module__ == kernels.__name__
    ]
    chosen = {f.__name__: parameters(f) for f in functions if f.__code__ is kernels.empty.__code__}
    assert {"linear", "paged_attention", "sample", "copy_blocks"} <= set(chosen)
    for name, expected in chosen.items():
        if name != "process_logits":  # hands its many arguments on
            assert parameters(getattr(kernels.on_device("simt"), name)) == expected, name


def test_a_context_belongs_to_its_thread() -> None:
    seen: list[torch.dtype] = []
    with kernels.using(kernels.on_device("simt", torch.bfloat16)):
        thread = threading.Thread(target=lambda: seen.append(kernels.empty(1).dtype))
        thread.start()
        thread.join()
        assert kernels.empty(1).dtype == torch.bfloat16
    assert seen == [torch.float32]
    assert kernels.empty(1).dtype == torch.float32
