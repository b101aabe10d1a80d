"""The embedded model as this project reads it, against transformers' own reading of the same GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from reference.frontend.checkpoint import SafetensorsCheckpoint, load_checkpoint, model_folder
from reference.frontend.model_store import resolve_model
from reference.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.oracle.passages import PASSAGES

pytestmark = pytest.mark.embedded

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
def oracle_checkpoint(checkpoint: SafetensorsCheckpoint) -> Mapping[str, Any]:
    """Tensors under transformers' own names for them, and the fields of the config that it finds.

    The step below `from_pretrained(gguf_file=...)`, which would need one more package, and which may keep the weights
    packed for kernels of its own; this one always dequantises.
    """
    with torch.device("meta"):
        names_only = LlamaForCausalLM(LlamaConfig(num_hidden_layers=checkpoint.config.num_hidden_layers))
    parsed: Mapping[str, Any] = load_gguf_checkpoint(
        str(resolve_model("smollm2-135m")), return_tensors=True, model_to_load=names_only
    )
    return parsed


@pytest.fixture(scope="module")
def oracle_tokenizer() -> Any:
    """transformers' tokenizer with the vocabulary and merges that it reads from the GGUF file itself."""
    path = resolve_model("smollm2-135m")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_all_tensors_are_bit_equal(
    checkpoint: SafetensorsCheckpoint, oracle_checkpoint: Mapping[str, Any]
) -> None:
    tensors = oracle_checkpoint["tensors"]
    assert len(tensors) == 272
    for name, tensor in tensors.items():
        expected = tensor.numpy()
        assert expected.dtype == np.float32
        assert np.array_equal(checkpoint.tensor(name).view(np.int32), expected.view(np.int32)), name
    checkpoint.check_all_used()


def test_the_configs_agree(checkpoint: SafetensorsCheckpoint, oracle_checkpoint: Mapping[str, Any]) -> None:
    config, expected = checkpoint.config, oracle_checkpoint["config"]
    names = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ]
    names += ["max_position_embeddings", "rope_theta", "vocab_size", "tie_word_embeddings", "bos_token_id"]
    assert {name: getattr(config, name) for name in names} == {name: expected[name] for name in names}
    assert config.rms_norm_eps == pytest.approx(
        expected["rms_norm_eps"], rel=1e-7
    )  # of float32, which GGUF stores
    assert config.eos_token_ids == (expected["eos_token_id"],)


@pytest.mark.parametrize("name", PASSAGES)
def test_passages_have_the_same_ids(tokenizer: Tokenizer, oracle_tokenizer: Any, name: str) -> None:
    # transformers does not cut digits apart first, and where two spaces or more stand before one, gets other ids.
    text = re.sub(r"\s{2,}(?=\d)", " ", PASSAGES[name])
    ids = tokenizer.encode(text)
    assert ids == oracle_tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


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
