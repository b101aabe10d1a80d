"""Random workloads on tiny random models: reference = fast = cold oracle (`tests/fuzz.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, run_workload
from tests.fuzz import assert_paths_were_taken, check_seeds
from tests.scale import FUZZ_WORKLOADS
from tests.tiny_models import make_tiny_llama
from tests.workloads import make_workload

MODELS = (
    {"num_heads": 4, "num_kv_heads": 2, "tie": True},
    {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "tie": False},
    {"num_heads": 7, "num_kv_heads": 1, "head_dim": 12, "tie": True},
    {"num_heads": 4, "num_kv_heads": 4, "head_dim": 24, "tie": True},
)
# Pieces for xdist. Each must take all paths by itself, so that no selection of tests can skip that check.
NUM_PARTS = 5


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("draft")
    return str(make_tiny_llama(folder, seed=9, max_position=128, num_layers=1, num_heads=2, num_kv_heads=1))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [
        str(make_tiny_llama(root / str(i), seed=i, max_position=128, **shape))  # type: ignore[arg-type]
        for i, shape in enumerate(MODELS)
    ]


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_workloads_are_equal_on_both_tiers_and_to_the_cold_oracle(
    models: list[str], draft_model: str, part: int
) -> None:
    seeds = range(FUZZ_WORKLOADS)[part::NUM_PARTS]
    paths = check_seeds(lambda seed: models[seed % len(models)], seeds, draft_model=draft_model)
    assert_paths_were_taken(paths)
    params = [request.params for seed in seeds for request in make_workload(seed).requests]
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
