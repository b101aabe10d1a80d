"""The embedded model as this project reads it, against transformers' own reading of the same GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from reference.frontend.checkpoint import SafetensorsCheckpoint, load_checkpoint, model_folder
from reference.frontend.model_store import resolve_model
from reference.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.oracle.passages import PASSAGES

pytestmark = [pytest.mark.embedded, pytest.mark.xdist_group("embedded-gguf")]

CONVERSATION = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "  And of Italy?\n"},
]


@pytest.fixture(scope="module")
def checkpoint() -> SafetensorsCheckpoint:
    return load_checkpoint(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def oracle_weights() -> Mapping[str, torch.Tensor]:
    path = resolve_model("smollm2-135m")
    # Without `dequantize` transformers may keep the weights packed and compute with kernels of its own.
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    weights: Mapping[str, torch.Tensor] = model.state_dict()
    return weights


@pytest.fixture(scope="module")
def oracle_tokenizer() -> Any:
    """transformers' tokenizer with the vocabulary and merges that it reads from the GGUF file itself."""
    path = resolve_model("smollm2-135m")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_all_tensors_are_bit_equal(
    checkpoint: SafetensorsCheckpoint, oracle_weights: Mapping[str, torch.Tensor]
) -> None:
    names = oracle_weights.keys() - {"lm_head.weight"}  # tied to the embedding
    assert len(names) == 272
    for name in names:
        expected = oracle_weights[name].numpy()
        assert np.array_equal(checkpoint.tensor(name).view(np.int32), expected.view(np.int32)), name
    checkpoint.check_all_used()


@pytest.mark.parametrize("name", PASSAGES)
def test_passages_have_the_same_ids(tokenizer: Tokenizer, oracle_tokenizer: Any, name: str) -> None:
    ids = tokenizer.encode(PASSAGES[name])
    assert ids == oracle_tokenizer.encode(PASSAGES[name])
    assert tokenizer.decode(ids) == PASSAGES[name]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_conversations_become_the_same_text_and_ids(tokenizer: Tokenizer, length: int) -> None:
    oracle = AutoTokenizer.from_pretrained(model_folder(resolve_model("smollm2-135m")))
    messages = CONVERSATION[-length:] if length == 1 else CONVERSATION[:length]
    for add_generation_prompt in (True, False):
        expected = oracle.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        assert tokenizer.apply_chat_template(messages, add_generation_prompt) == expected
    ids = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages) == ids


def test_a_dequantised_matrix_has_few_values_in_every_block(checkpoint: SafetensorsCheckpoint) -> None:
    blocks = checkpoint.tensor("model.layers.0.mlp.down_proj.weight")[:8].reshape(
        -1, 32
    )  # Q4_1: 16 levels for 32 weights
    assert max(len(np.unique(block)) for block in blocks) <= 16
