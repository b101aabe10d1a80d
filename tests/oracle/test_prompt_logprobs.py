"""Log-probabilities of a prompt against transformers' log-softmax at every position, for every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from tests.architectures import ARCHITECTURES
from tests.tiny_models import make_tiny_model

# A logit is at most 1e-4 away from transformers' (tests/oracle/test_architectures.py says why); the log of the sum of
# exponentials moves by no more than the largest of its logits, so the difference of the two moves by twice as much.
TOLERANCE = 2e-4
NUM_LOGPROBS = 5


@pytest.fixture(params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", query_gain=0.35, **ARCHITECTURES[request.param])


def test_prompt_logprobs_equal_the_log_softmax_of_transformers(tier: Tier, folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(2, 320, 90).tolist()
    oracle: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits = oracle.eval()(torch.tensor([tokens])).logits[0].double()  # [T, V]
    expected = torch.log_softmax(logits, dim=-1).numpy()  # [T, V]
    assert expected.std() >= 2  # differences of 1e-4 are small only beside values that are not

    engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), max_num_batched_tokens=40), tier)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM_LOGPROBS)
    engine.add_request("a", tokens, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    first, *tables = outputs[-1].prompt_logprobs or ()
    assert first is None
    assert len(tables) == 89
    for position, table in enumerate(tables, start=1):
        assert table is not None
        row = expected[position - 1]  # what stands before says what comes next
        assert next(iter(table)) == tokens[position]
        for token_id, entry in table.items():
            assert entry.logprob == pytest.approx(row[token_id], abs=TOLERANCE)
            # Of those that are nearer to one another than rounding nobody can say which ranks first.
            nearby = (row > row[token_id] - 2 * TOLERANCE).sum() - (row > row[token_id] + 2 * TOLERANCE).sum()
            assert abs(entry.rank - 1 - int((row > row[token_id]).sum())) < nearby
        worst = min(entry.logprob for entry in table.values() if entry.rank <= NUM_LOGPROBS)
        assert (row > worst + 2 * TOLERANCE).sum() < NUM_LOGPROBS, "a better one was left out"
