"""Steps of the fast tier that are replayed from a plan have the bits of the model called directly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fast.cpu_forward
from fast.cpu_forward import PlannedForward
from fast.input_batch import StepInput
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import load_tier
from tests.architectures import ARCHITECTURES
from tests.tiny_models import make_tiny_model


@pytest.fixture
def compared_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Every step is computed twice. Tokens of each, and whether some of them came as vectors."""
    steps: list[tuple[int, bool]] = []
    planned = PlannedForward.__call__

    def compare(self: PlannedForward, step: StepInput, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        vectors = None if inputs_embeds is None else inputs_embeds.clone()  # the model overwrites them
        direct = self.model.forward(step.input_ids, step.positions, self.kv_caches, step.attention, vectors)
        for k_cache, v_cache in self.kv_caches:  # what a plan does not write shows
            k_cache.view(-1, *k_cache.shape[2:])[step.attention.slot_mapping] = torch.nan
            v_cache.view(-1, *v_cache.shape[2:])[step.attention.slot_mapping] = torch.nan
        hidden = planned(self, step, inputs_embeds)
        assert torch.equal(hidden, direct)
        steps.append((len(hidden), inputs_embeds is not None))
        return hidden

    monkeypatch.setattr(PlannedForward, "__call__", compare)
    return steps


def run(model: Path, hidden_size: int) -> None:
    args = EngineArgs(
        model=str(model), max_model_len=64, max_num_batched_tokens=24, max_num_seqs=4, block_size=4
    )
    engine = LLMEngine.from_engine_args(args, load_tier("fast"))
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=6, ignore_eos=True)
    for i in range(5):
        ids = [(7 * i + j) % 90 + 3 for j in range(9 * i + 1)]
        engine.add_request(f"r{i}", {"prompt_token_ids": ids}, params)
    vectors = np.random.default_rng(0).standard_normal((11, hidden_size), np.float32)
    engine.add_request("vectors", {"prompt_embeds": vectors}, params)
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_planned_step_has_the_bits_of_the_model(
    name: str, tmp_path: Path, compared_steps: list[tuple[int, bool]]
) -> None:
    folder = make_tiny_model(tmp_path / name, **ARCHITECTURES[name])
    hidden_size = LLMEngine.from_engine_args(EngineArgs(model=str(folder)), load_tier("reference"))
    run(folder, hidden_size.config.model.hidden_size)
    assert {tokens for tokens, _ in compared_steps} >= {1, 24}
    assert {with_vectors for _, with_vectors in compared_steps} == {True, False}


def test_a_step_above_the_size_of_the_plan_is_computed_by_the_model_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared_steps: list[tuple[int, bool]]
) -> None:
    monkeypatch.setattr(fast.cpu_forward, "_MAX_PLANNED_TOKENS", 7)
    folder = make_tiny_model(tmp_path / "llama", **ARCHITECTURES["qwen2"])
    recorded: list[int] = []
    replay = fast.cpu_forward.kernels.Plan.replay

    def note(self: fast.cpu_forward.kernels.Plan, num_tokens: int, num_seqs: int) -> None:
        recorded.append(num_tokens)
        replay(self, num_tokens, num_seqs)

    monkeypatch.setattr(fast.cpu_forward.kernels.Plan, "replay", note)
    run(folder, 64)
    assert sorted(tokens for tokens, _ in compared_steps if tokens <= 7) == sorted(recorded)
    assert max(tokens for tokens, _ in compared_steps) == 24
