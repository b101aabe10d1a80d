"""Every architecture and rope scaling against transformers, which reads the same folder itself; on both tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from reference.contracts.protocols import Tier
from reference.contracts.rope import rope_frequencies
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import NewRequestData, RunningRequestData, SchedulerOutput
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.workload import Workload, WorkloadRequest, run_workload
from tests.architectures import ARCHITECTURES
from tests.tiny_models import make_tiny_model

# Logits with a standard deviation of 3 to 4 are sums of 64 to 256 float32 products in another order than
# transformers'. Queries are a third of the usual length: scores of +-30 and more carry the last bits of two layers
# into the softmax, and then transformers' own float32 is 1e-4 away from its float64. Measured on the shorter ones:
# 4e-5 at most. A bias, norm or frequency left out moves logits by 0.1 and more.
TOLERANCE = 1e-4
QUERY_GAIN = 0.35
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", query_gain=QUERY_GAIN, **ARCHITECTURES[request.param])


@pytest.fixture
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 320, count).tolist()


def prescribed_logits(tier: Tier, folder: Path, tokens: list[int], chunks: list[int]) -> Iterator[np.ndarray]:
    """The logits after the prompt, computed in chunks, and after every further token, decoded one by one."""
    checkpoint = load_checkpoint(folder)
    args = EngineArgs(model=str(folder), block_size=4, num_blocks=64, keep_logits=True)
    runner = tier.make_model_runner(args.create_engine_config(checkpoint.config, "cpu"), checkpoint)
    prompt, blocks = tokens[: sum(chunks)], tuple(range(40, 40 - (len(tokens) + 3) // 4, -1))
    new = (NewRequestData("a", tuple(prompt), len(prompt), 0, blocks, GREEDY, seed=0),)
    computed = 0
    for count in chunks + [1] * (len(tokens) - len(prompt)):
        known = tuple(tokens[computed : computed + count]) if computed >= len(prompt) else ()
        running = () if new else (RunningRequestData("a", known, (), computed),)
        output = runner.execute(SchedulerOutput(0, new, running, {"a": count}, (), ()))
        new, computed = (), computed + count
        if computed >= len(prompt):
            assert output.logits is not None
            yield output.logits["a"][0]


def test_logits_of_prefill_and_decode_equal_those_of_transformers(
    tier: Tier, folder: Path, oracle: Any
) -> None:
    tokens = random_tokens(96)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0].numpy()  # [T, V]
    assert expected.std() >= 2  # differences of 1e-4 are small only beside logits that are not
    rows = list(prescribed_logits(tier, folder, tokens, [13, 30, 17]))
    assert len(rows) == 96 - 60 + 1
    for position, row in enumerate(rows, start=59):
        assert np.abs(row - expected[position]).max() < TOLERANCE, position


def test_greedy_tokens_equal_those_of_transformers(tier: Tier, folder: Path, oracle: Any) -> None:
    tokens = random_tokens(40, seed=1)
    with torch.inference_mode():
        generated = oracle.generate(
            torch.tensor([tokens]), max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None
        )
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), max_num_batched_tokens=16), tier)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    request = WorkloadRequest("a", prompt_token_ids=tuple(tokens), params=params)
    assert run_workload(engine, Workload((request,)))["a"].outputs[0].token_ids == generated[0, 40:].tolist()


# B59: rope scaling

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500_000.0},
    "linear 2": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "yarn 4": {
        "max_position_embeddings": 32_768,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "yarn, given attention factor": {
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 0.75,
            "beta_fast": 16,
            "beta_slow": 2,
        },
    },
    "yarn, factor from the lengths": {
        "max_position_embeddings": 32_768,
        "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192},
    },
    "yarn, fractional borders and mscale": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
        }
    },
}


def default_frequencies(config: Any) -> tuple[torch.Tensor, float]:
    """transformers has the unscaled formula in each model's own class, and not in the table."""
    model = AutoModelForCausalLM.from_config(config).model
    return model.rotary_emb.inv_freq, model.rotary_emb.attention_scaling


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_b59_frequencies_and_attention_factor_equal_those_of_transformers(
    tmp_path: Path, scaling: str, head_dim: int
) -> None:
    folder = make_tiny_model(tmp_path, **{"head_dim": head_dim} | SCALINGS[scaling])
    config, theirs = load_checkpoint(folder).config, AutoConfig.from_pretrained(folder)
    kind = theirs.rope_parameters["rope_type"]
    init = ROPE_INIT_FUNCTIONS.get(kind)
    expected, factor = init(theirs, "cpu") if init else default_frequencies(theirs)
    ours = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6, atol=0)
    attention_factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    assert attention_factor == pytest.approx(factor, rel=1e-6)
    plain = rope_frequencies(config.head_dim, config.rope_theta, None)
    assert (kind == "default") == np.array_equal(ours, plain)
