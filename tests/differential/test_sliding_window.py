"""Tiny Mistrals with short windows: reference = fast = cold oracle where blocks leave windows all the time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.contracts.config import cdiv
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, WorkloadRun
from tests.fuzz import check_seeds
from tests.tiny_models import make_tiny_model
from tests.workloads import TINY

SEEDS = range(12)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [8, 16])
def test_random_workloads_are_equal_on_both_tiers_and_to_the_cold_oracle(
    tmp_path: Path, window: int, block_size: int
) -> None:
    model = str(make_tiny_model(tmp_path, "MistralForCausalLM", seed=window, sliding_window=window))
    # The smallest pool, and many requests at once: windows leave little for which anybody must be preempted.
    options = {
        "block_size": block_size,
        "num_blocks": cdiv(60, block_size) + 1,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 24,
        "enable_chunked_prefill": True,
    }
    space = replace(TINY, stretches=(0,))  # a pool of 60 tokens holds no longer requests
    paths = check_seeds(lambda _: model, SEEDS, space, **options)
    # A run that never takes the interesting paths proves nothing.
    least = {"preempted": 2, "cached": 2, "copied": 2 if block_size > 1 else 0}
    for path, number in least.items():
        assert sum(path in each.taken for each in paths) >= number, path


class Steps:
    """What a run did with the null block: dead entries in tables, and what the runner's cache holds there."""

    def __init__(self, model: str, tier_name: str, **options: Any) -> None:
        args = EngineArgs(model=model, num_blocks=40, **options)
        self.engine = LLMEngine.from_engine_args(args, load_tier(tier_name), on_step=self.see)
        self.num_null_entries = 0

    def see(self, schedule: SchedulerOutput, _: ModelRunnerOutput) -> None:
        tables = self.engine.engine_core.scheduler.snapshot().cache.block_tables
        self.num_null_entries += sum(table.count(0) for table in tables.values())

    def run(self, requests: list[WorkloadRequest]) -> dict[str, list[list[int]]]:
        run = WorkloadRun(self.engine, Workload(tuple(requests)))
        while not run.is_done:
            run.step()
        return {name: [each.token_ids for each in output.outputs] for name, output in run.finished.items()}

    def null_block(self) -> np.ndarray:
        caches = self.engine.engine_core.executor.model_runner.kv_caches  # type: ignore[attr-defined]
        return np.stack([np.asarray(cache[0]) for pair in caches for cache in pair])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_b26_nothing_is_written_to_the_null_block_and_what_it_holds_reaches_no_token(
    tmp_path: Path, tier_name: str, block_size: int
) -> None:
    """The same run twice, the second time with NaN in the null block: the runner never reads or writes it."""
    model = str(make_tiny_model(tmp_path, "MistralForCausalLM", sliding_window=8))
    params = SamplingParams(temperature=0.8, max_tokens=30, seed=3, n=2, ignore_eos=True)
    prompts = {"a": range(2, 25), "b": range(2, 31)}  # b finds the blocks of a
    requests = [
        WorkloadRequest(name, prompt_token_ids=tuple(prompt), arrival_step=4 * i, params=params)
        for i, (name, prompt) in enumerate(prompts.items())
    ]
    clean = Steps(model, tier_name, block_size=block_size, max_num_batched_tokens=10, max_model_len=128)
    spoilt = Steps(model, tier_name, block_size=block_size, max_num_batched_tokens=10, max_model_len=128)
    for pair in spoilt.engine.engine_core.executor.model_runner.kv_caches:  # type: ignore[attr-defined]
        for cache in pair:
            cache[0] = float("nan")
    tokens = clean.run(requests)
    assert clean.num_null_entries > 100 // block_size
    assert not clean.null_block().any()
    assert spoilt.run(requests) == tokens
    assert np.isnan(spoilt.null_block()).all()
