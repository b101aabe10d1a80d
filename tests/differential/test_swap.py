"""Preemption by swap with a real model: K and V that went to the host pool and back give the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.diff import compare_tiers
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.metrics import Metrics
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, run_workload
from tests.tiny_models import make_tiny_llama


def make_workload(n: int = 1) -> Workload:
    """The forced-preemption recipe of the case collection: P = 34, 35 new tokens, block size 16."""
    params = SamplingParams(temperature=0.8, seed=5, n=n, max_tokens=35, ignore_eos=True)
    return Workload(
        tuple(
            WorkloadRequest(f"r{i}", prompt_token_ids=tuple(range(10 + i, 44 + i)), params=params)
            for i in range(2)
        )
    )


def run(
    model: Path, tier_name: str, num_usable_blocks: int, n: int = 1, **options: Any
) -> tuple[Metrics, dict[str, list[list[int]]]]:
    args = EngineArgs(
        model=str(model),
        num_blocks=num_usable_blocks + 1,
        max_model_len=100,
        preemption_mode="swap",
        **options,
    )
    engine = LLMEngine.from_engine_args(args, load_tier(tier_name))
    finished = run_workload(engine, make_workload(n))
    tokens = {
        name: [completion.token_ids for completion in output.outputs] for name, output in finished.items()
    }
    return engine.metrics.snapshot(), tokens


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("n", "num_usable_blocks"), [(1, 7), (3, 11)])
def test_swapped_requests_give_the_tokens_of_an_ample_pool(
    tmp_path: Path, tier_name: str, n: int, num_usable_blocks: int, caching: bool
) -> None:
    make_tiny_llama(tmp_path)
    tight, tight_tokens = run(tmp_path, tier_name, num_usable_blocks, n, enable_prefix_caching=caching)
    ample, ample_tokens = run(tmp_path, tier_name, 100, n, enable_prefix_caching=caching)
    assert tight.num_preemptions > 0
    assert ample.num_preemptions == 0
    assert tight.num_swapped_out_blocks >= tight.num_swapped_in_blocks
    assert (tight.num_swapped_in_blocks > 0) or caching
    assert (ample.num_swapped_out_blocks, ample.num_swapped_in_blocks) == (0, 0)
    assert tight_tokens == ample_tokens


def test_nothing_is_computed_twice(tmp_path: Path, tier_name: str) -> None:
    make_tiny_llama(tmp_path)
    args = EngineArgs(
        model=str(tmp_path), num_blocks=8, max_model_len=100, preemption_mode="swap", trace=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = LLMEngine.from_engine_args(args, load_tier(tier_name))
    run_workload(engine, make_workload())
    num_computed = sum(trace.budget_used for trace in engine.engine_core.traces)
    assert engine.metrics.snapshot().num_preemptions > 0
    assert num_computed == 2 * (34 + 35 - 1)


def test_both_tiers_swap_the_same_blocks(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    config = {"num_blocks": 12, "max_model_len": 100, "preemption_mode": "swap", "swap_space": 20_000}
    workload = Workload(make_workload(n=3).requests, config)
    report = compare_tiers((load_tier("reference"), load_tier("fast")), str(tmp_path), workload)
    assert report.divergence is None
    assert report.num_preemptions > 0
