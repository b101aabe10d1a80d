"""Reading weights: Hugging Face folders and GGUF files, what they mean and everything that can be wrong with them."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from safetensors.numpy import load_file, save_file

from reference.contracts.protocols import Tier
from reference.frontend import checkpoint as checkpoint_module
from reference.frontend import gguf_file
from reference.frontend.checkpoint import load_checkpoint, model_folder
from reference.frontend.engine_args import EngineArgs
from reference.frontend.model_store import ModelError, resolve_model
from reference.frontend.tokenizer import load_tokenizer
from tests import tiny_gguf
from tests.architectures import ARCHITECTURES, LLAMA3, YARN
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import make_tiny_llama, make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An own cache for every test; only the embedded model comes from the real one."""
    folder = tmp_path / "home"
    if request.node.get_closest_marker("embedded") is None:
        monkeypatch.setenv("TWINFER_HOME", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "tiny")


@pytest.fixture
def gguf_path(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(folder, path)
    return path


def change(folder: Path, **changes: Any) -> Path:
    """Set fields of config.json; `...` removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return folder


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def refusal(path: Path) -> str:
    """The one sentence with which a model is refused."""
    with pytest.raises(ModelError) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


# Hugging Face folders


def test_every_tensor_of_a_folder_is_read_as_it_was_written(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    for name, weight in weights(folder).items():
        tensor = checkpoint.tensor(name)
        assert tensor.dtype == np.float32
        assert tensor.flags.c_contiguous
        np.testing.assert_array_equal(tensor, weight)
    checkpoint.check_all_used()


def test_float32_tensors_are_views_of_the_file_and_read_only(folder: Path) -> None:
    tensor = load_checkpoint(folder).tensor(GATE)
    assert not tensor.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        tensor[0, 0] = 1


def test_half_precision_is_widened_exactly(folder: Path) -> None:
    half = {name: weight.astype(np.float16) for name, weight in weights(folder).items()}
    checkpoint = load_checkpoint(rewrite(folder, half))
    np.testing.assert_array_equal(checkpoint.tensor(GATE), half[GATE].astype(np.float32))
    assert checkpoint.tensor(GATE).dtype == np.float32


def test_bfloat16_is_widened_exactly(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch_file

    rounded = {name: torch.tensor(weight).bfloat16() for name, weight in weights(folder).items()}
    save_torch_file(rounded, folder / "model.safetensors")
    checkpoint = load_checkpoint(folder)
    np.testing.assert_array_equal(checkpoint.tensor(GATE), rounded[GATE].float().numpy())


def test_tensors_at_odd_addresses_are_aligned(folder: Path) -> None:
    data = np.arange(64, dtype=np.float32)
    header = json.dumps(
        {"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
    ).encode()
    header += b" " * (len(header) % 2 == 0)  # 8 bytes of length and an odd number of header bytes
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data.tobytes())
    tensor = load_checkpoint(folder).tensor("model.norm.weight")
    assert tensor.flags.aligned
    np.testing.assert_array_equal(tensor, data)


def shard(folder: Path) -> Path:
    """Split the weights over two files, with an index."""
    tensors = weights(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {
        name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))
    }
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def test_sharded_weights_are_read_through_their_index(folder: Path) -> None:
    expected = weights(folder)
    checkpoint = load_checkpoint(shard(folder))
    for name, weight in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), weight)
    checkpoint.check_all_used()


def test_a_missing_shard_is_named(folder: Path) -> None:
    (shard(folder) / "model-00002-of-00002.safetensors").unlink()
    assert "is incomplete: model-00002-of-00002.safetensors is missing" in refusal(folder)


def test_an_index_cannot_point_out_of_its_folder(folder: Path, tmp_path: Path) -> None:
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"x": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "secret.safetensors is missing" in refusal(folder)


def test_a_tensor_that_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tensor 'lm_head.weight'"):
        load_checkpoint(folder).tensor("lm_head.weight")


def test_a_tensor_whose_shape_disagrees_with_the_config_is_named_with_both(folder: Path) -> None:
    checkpoint = load_checkpoint(change(folder, intermediate_size=96))
    with pytest.raises(
        ModelError, match=rf"{GATE} has the shape \(128, 64\), but .*config.json asks for \(96, 64\)"
    ):
        checkpoint.tensor(GATE)


def test_tensors_that_nobody_asked_for_are_named(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    checkpoint = load_checkpoint(rewrite(folder, weights(folder) | extra))
    for name in weights(folder).keys() - extra.keys():
        checkpoint.tensor(name)
    with pytest.raises(ModelError, match=r"does not know: model.layers.0.self_attn.q_proj.bias; "):
        checkpoint.check_all_used()


def test_known_leftovers_may_stay_unused(folder: Path) -> None:
    tensors = weights(folder)
    tied = {
        "lm_head.weight": tensors[EMBEDDING],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    checkpoint = load_checkpoint(rewrite(folder, tensors | tied))
    for name in tensors:
        checkpoint.tensor(name)
    checkpoint.check_all_used()


def test_an_untied_output_matrix_must_be_used(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "untied", tie=False)
    checkpoint = load_checkpoint(folder)
    for name in weights(folder).keys() - {"lm_head.weight"}:
        checkpoint.tensor(name)
    with pytest.raises(ModelError, match=r"lm_head.weight"):
        checkpoint.check_all_used()


# config.json


def test_the_config_is_read_in_full(folder: Path) -> None:
    config = load_checkpoint(folder).config
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 64, 128)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_position_embeddings) == (16, 512)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 10000.0)
    assert config.tie_word_embeddings is True
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))


def test_absent_fields_take_their_defaults(folder: Path) -> None:
    absent = dict.fromkeys(
        ("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings", "bos_token_id"), ...
    )
    config = load_checkpoint(change(folder, **absent)).config
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (16, 4, 10000.0)
    assert (config.tie_word_embeddings, config.bos_token_id) == (False, None)


@pytest.mark.parametrize(
    "theta", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}]
)
def test_rope_theta_is_read_from_old_and_new_configs(folder: Path, theta: dict[str, Any]) -> None:
    assert load_checkpoint(change(folder, **({"rope_theta": ...} | theta))).config.rope_theta == 5e5


@pytest.mark.parametrize(
    ("model", "generation", "merged"),
    [(1, 1, (1,)), (1, [2, 1], (1, 2)), ([3, 2], None, (3, 2)), (None, 5, (5,)), (None, None, ())],
)
def test_ends_of_text_come_from_both_configs(
    folder: Path, model: Any, generation: Any, merged: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_checkpoint(change(folder, eos_token_id=model)).config.eos_token_ids == merged


def test_code_that_a_config_points_to_is_ignored(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('imported')")
    load_checkpoint(change(folder, auto_map={"AutoModelForCausalLM": "evil.Model"}))
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"architectures": ["BertModel"]},
            "'BertModel' is not supported; supported: .*LlamaForCausalLM, Mistral",
        ),
        ({"architectures": ...}, "architecture None is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architecture None is not supported"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope scaling 'dynamic', which is not supported",
        ),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope scaling 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "field 'low_freq_factor' is missing"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "must be below high_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "field 'factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor must be a positive number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e20}}, "max_position_embeddings must be"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e-9}}, "max_position_embeddings must be"),
        ({"rope_scaling": YARN | {"beta_fast": -1}}, "beta_fast must be a positive number"),
        ({"rope_scaling": YARN | {"mscale": "1", "mscale_all_dim": 1}}, "mscale must be a positive number"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta must be above 1"),
        ({"rope_parameters": 7}, "must be tables"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "each type of layer"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "only a part of each head"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types names 'sliding_attention'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ({"vocab_size": ...}, "field 'vocab_size' is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1"),
        ({"num_hidden_layers": 2**60}, "num_hidden_layers must be an integer from 1"),
        ({"max_position_embeddings": True}, "max_position_embeddings must be an integer"),
        ({"num_attention_heads": -4}, "num_attention_heads must be an integer from 1"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"head_dim": 15}, r"head_dim \(15\) must be even"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"bos_token_id": -1}, "bos_token_id must be a token id"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    folder: Path, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_checkpoint(change(folder, **fields))


# Architectures


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_of_every_architecture_is_known_and_checked(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path, **ARCHITECTURES[name])
    checkpoint = load_checkpoint(folder)
    for tensor, weight in weights(folder).items():
        assert checkpoint_module.expected_shape(checkpoint.config, tensor) == weight.shape
        np.testing.assert_array_equal(checkpoint.tensor(tensor), weight)
    checkpoint.check_all_used()


@pytest.mark.parametrize("tensor", ["q_proj.bias", "k_norm.weight"])
def test_a_bias_or_a_norm_of_the_wrong_length_is_named_with_both_shapes(tmp_path: Path, tensor: str) -> None:
    folder = make_tiny_model(tmp_path, "Qwen3ForCausalLM", attention_bias=True)
    name = f"model.layers.1.self_attn.{tensor}"
    rewrite(folder, weights(folder) | {name: np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match=rf"{name} has the shape \(3,\), but .* asks for \((64|16),\)"):
        load_checkpoint(folder).tensor(name)


def switches(folder: Path) -> tuple[bool, ...]:
    config = load_checkpoint(folder).config
    return config.qkv_bias, config.o_proj_bias, config.mlp_bias, config.qk_norm


def test_each_architecture_switches_on_what_transformers_gives_it(tmp_path: Path) -> None:
    for name, fields, expected in (
        ("LlamaForCausalLM", {}, (False, False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True, False)),
        ("MistralForCausalLM", {"sliding_window": None}, (False, False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
    ):
        assert switches(make_tiny_model(tmp_path, name, **fields)) == expected


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("LlamaForCausalLM", {"max_position_embeddings": ...}, (4, 16, 2048)),
        ("LlamaForCausalLM", {"num_key_value_heads": None, "head_dim": None}, (4, 16, 512)),
        ("MistralForCausalLM", {"sliding_window": None, "max_position_embeddings": ...}, (4, 16, 131_072)),
        ("Qwen2ForCausalLM", {"max_position_embeddings": ...}, (4, 16, 32_768)),
        ("Qwen3ForCausalLM", {"head_dim": ..., "max_position_embeddings": ...}, (4, 128, 32_768)),
    ],
)
def test_an_absent_field_has_the_default_of_its_architecture(
    tmp_path: Path, name: str, fields: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    folder = make_tiny_model(tmp_path, name, num_key_value_heads=4)
    config = load_checkpoint(change(folder, **fields)).config
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == expected


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 100,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        (
            "MistralForCausalLM",  # transformers would read past the second type
            {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]},
        ),
    ],
)
def test_a_window_of_some_layers_alone_is_refused(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    sentence = (
        "the model needs sliding-window attention in some layers and full attention in others, "
        "which is not supported."
    )
    assert sentence in refusal(make_tiny_model(tmp_path, name, **fields))


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["sliding_attention", "sliding_attention"]},
            "layer_types names 'sliding_attention', but the config switches no window on.",
        ),
        (
            "LlamaForCausalLM",
            {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 8},
            "layer_types names 'sliding_attention', but the config switches no window on.",
        ),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["chunked_attention", "full_attention"]},
            "layers of the types ['chunked_attention', 'full_attention'], which is not supported.",
        ),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be an integer from 1"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": "all"},
            "max_window_layers must be an integer, got 'all'.",
        ),
    ],
)
def test_a_window_that_cannot_be_understood_is_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(make_tiny_model(tmp_path, name, **fields))


@pytest.mark.parametrize(
    ("name", "fields", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": 511}, 511),
        ("MistralForCausalLM", {"sliding_window": 1, "layer_types": ["sliding_attention"] * 2}, 1),
        ("MistralForCausalLM", {"max_position_embeddings": 8192}, 4096),  # what transformers assumes
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0},
            100,
        ),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 2},
            9,
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "max_window_layers": 0, "max_position_embeddings": 8192},
            4096,
        ),
    ],
)
def test_one_window_for_all_layers_is_read(
    tmp_path: Path, name: str, fields: dict[str, Any], window: int
) -> None:
    assert load_checkpoint(make_tiny_model(tmp_path, name, **fields)).config.sliding_window == window


@pytest.mark.parametrize(("window", "expected"), [(8, 8), (0, None), (512, None), (1000, None)])
def test_a_window_is_read_from_a_gguf_file(
    folder: Path, tmp_path: Path, window: int, expected: int | None
) -> None:
    write_tiny_gguf(folder, tmp_path / "x.gguf", llama__attention__sliding_window=window)
    config = load_checkpoint(tmp_path / "x.gguf").config
    assert config.sliding_window == expected
    assert config.architecture == ("LlamaForCausalLM" if expected is None else "MistralForCausalLM")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("MistralForCausalLM", {"sliding_window": None}),
        ("MistralForCausalLM", {"sliding_window": 512}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 100, "max_window_layers": 1}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}),
        ("Qwen3ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}),
        ("LlamaForCausalLM", {"sliding_window": 8}),  # not a field of Llama
    ],
)
def test_a_window_that_never_hides_a_token_is_no_window(
    tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    config = load_checkpoint(make_tiny_model(tmp_path, name, **fields)).config
    assert (config.max_position_embeddings, config.sliding_window) == (512, None)


GPT2 = "GPT2LMHeadModel"


def test_a_gpt2_config_is_read_by_its_own_names(tmp_path: Path) -> None:
    config = load_checkpoint(make_tiny_model(tmp_path, GPT2, n_inner=96, layer_norm_epsilon=1e-6)).config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (320, 64, 96)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 4)
    assert (config.head_dim, config.max_position_embeddings) == (16, 512)
    assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-6, 0.0, True)
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))


def test_absent_fields_of_a_gpt2_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, GPT2)
    absent = dict.fromkeys(("n_positions", "n_inner", "activation_function", "layer_norm_epsilon"), ...)
    config = load_checkpoint(change(folder, **absent)).config
    assert (config.max_position_embeddings, config.intermediate_size) == (1024, 256)
    assert config.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"activation_function": "relu"}, "the activation 'relu', which is not supported"),
        ({"scale_attn_weights": False}, "attention without scaling"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scaling by layer"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"n_head": 5}, r"n_embd \(64\) must be a multiple of n_head \(5\)"),
        ({"n_layer": ...}, "field 'n_layer' is missing"),
    ],
)
def test_a_gpt2_that_cannot_be_served_is_refused(
    tmp_path: Path, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_checkpoint(change(make_tiny_model(tmp_path, GPT2), **fields))


def test_the_first_gpt2_files_without_a_prefix_and_with_causal_masks_are_read(
    tmp_path: Path, tier: Tier
) -> None:
    folder = make_tiny_model(tmp_path, GPT2)
    tensors = weights(folder)
    masks = {
        "h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32),
        "h.0.attn.masked_bias": np.zeros(1, np.float32),
    }
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks
    checkpoint = load_checkpoint(rewrite(folder, old))
    tier.make_model_runner(EngineArgs().create_engine_config(checkpoint.config, "cpu"), checkpoint)
    np.testing.assert_array_equal(
        checkpoint.tensor("transformer.h.1.mlp.c_fc.weight"), tensors["transformer.h.1.mlp.c_fc.weight"]
    )


def test_a_gpt2_matrix_the_other_way_round_is_refused_with_both_shapes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, GPT2)
    name = "transformer.h.0.attn.c_attn.weight"
    tensors = weights(folder)
    rewrite(folder, tensors | {name: np.ascontiguousarray(tensors[name].T)})
    with pytest.raises(ModelError, match=rf"{name} has the shape \(192, 64\), but .* asks for \(64, 192\)"):
        load_checkpoint(folder).tensor(name)


# B59: rope scaling


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_b59_scaling_is_read_from_old_and_new_configs(folder: Path, form: str, key: str) -> None:
    table = {key if name == "rope_type" else name: value for name, value in LLAMA3.items()}
    scaling = load_checkpoint(change(folder, **{form: table})).config.rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor) == ("llama3", 8.0)
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)
    assert scaling.original_max_position_embeddings == 32


YARN_4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("max_position", "scaling", "longest"),
    [
        (8192, None, 8192),
        (32_768, YARN_4, 32_768),  # the config states the result: it is not multiplied again
        (8192, YARN_4, 32_768),  # or the length before scaling: it is
        (8192, {"rope_type": "yarn", "factor": 4.0}, 32_768),
        (32_768, YARN_4 | {"factor": None}, 32_768),
        (4096, {"rope_type": "linear", "factor": 2.0}, 8192),
        (131_072, LLAMA3 | {"original_max_position_embeddings": 8192}, 131_072),
    ],
)
def test_b59_the_longest_sequence_follows_from_the_scaling_once(
    folder: Path, max_position: int, scaling: dict[str, Any] | None, longest: int
) -> None:
    changed = change(folder, max_position_embeddings=max_position, rope_scaling=scaling)
    assert load_checkpoint(changed).config.max_position_embeddings == longest


def test_b59_positions_from_the_longest_sequence_on_are_refused(folder: Path) -> None:
    model = load_checkpoint(change(folder, max_position_embeddings=32_768, rope_scaling=YARN_4)).config
    config = EngineArgs(max_num_batched_tokens=64).create_engine_config(model, "cpu")
    assert config.scheduler.max_model_len == 32_768
    with pytest.raises(ValueError, match=r"max_model_len \(32769\) is above the 32768 positions"):
        EngineArgs(max_model_len=32_769).create_engine_config(model, "cpu")


# Damaged folders


def cut(file: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size]) and None


def write(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content) and None


def remove(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def write_header(header: Any, data: bytes = b"\0" * 256) -> Callable[[Path], None]:
    content = json.dumps(header).encode()
    return write("model.safetensors", struct.pack("<Q", len(content)) + content + data)


def entry(dtype: Any = "F32", shape: Any = (64,), offsets: Any = (0, 256)) -> Callable[[Path], None]:
    return write_header({"model.norm.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGED = [
    (remove("config.json"), "has no config.json"),
    (write("config.json", b""), "config.json is not valid JSON"),
    (write("config.json", b"[1]"), "must hold a JSON object"),
    (write("config.json", b"\xff\xfe\x00"), "not UTF-8"),
    (write("config.json", b"[" * 100_000), "config.json is not valid JSON"),
    (write("generation_config.json", b"{"), "generation_config.json is not valid JSON"),
    (remove("model.safetensors"), r"holds no \*\.safetensors file\."),
    (only_pickle, r"\.bin and \.pt files can run code and are never read"),
    (write("model.safetensors.index.json", b"{}"), "no usable weight_map"),
    (write("model.safetensors.index.json", b'{"weight_map": {"a": 1}}'), "no usable weight_map"),
    (write("model.safetensors.index.json", b'{"weight_map": {}}'), r"holds no \*\.safetensors"),
    (write("model.safetensors", b""), "model.safetensors is empty"),
    (cut("model.safetensors", 5), "damaged or cut off"),
    (cut("model.safetensors", 100), "damaged or cut off"),
    (cut("model.safetensors", -4), "lies outside the file"),
    (write("model.safetensors", b"\xff" * 64), "damaged or cut off"),
    (write("model.safetensors", struct.pack("<Q", 4) + b"{{{{"), "header is not JSON"),
    (write("model.safetensors", struct.pack("<Q", 90_000) + b"[" * 90_000), "header is not JSON"),
    (write_header([1, 2]), "not a table of tensors"),
    (write_header({"x": 3}), "tensor 'x' cannot be read"),
    (write_header({"x": {"dtype": "F32"}}), "tensor 'x' cannot be read"),
    (entry(dtype="F64"), "type 'F64'; F32, F16 and BF16 are supported"),
    (entry(dtype=["F32"]), "cannot be read"),
    (entry(shape=[63]), "cannot be read"),
    (entry(shape=[-64]), "lies outside the file"),
    (entry(shape=[2**70]), "cannot be read"),
    (entry(shape=[2**62, 4]), "cannot be read"),
    (entry(shape=[1.5]), "cannot be read"),
    (entry(shape=None), "cannot be read"),
    (entry(offsets=[0, 257]), "lies outside the file"),
    (entry(offsets=[-256, 0]), "lies outside the file"),
    (entry(offsets=[256, 0]), "lies outside the file"),
    (entry(offsets=[0, 2**80]), "lies outside the file"),
    (entry(offsets=["0", "256"]), "cannot be read"),
    (entry(offsets=[0]), "cannot be read"),
    (entry(offsets=[0, 255]), "cannot be read"),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGED)
def test_a_damaged_folder_is_one_sentence(
    folder: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=sentence) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_read_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", denied)
        assert "config.json cannot be read (Permission denied)" in refusal(folder)
    monkeypatch.setattr(checkpoint_module.np, "memmap", denied)
    assert "model.safetensors cannot be read (Permission denied)" in refusal(folder)


# GGUF files


@pytest.mark.parametrize(
    "shape", [{}, {"num_heads": 9, "num_kv_heads": 3, "head_dim": 8, "hidden_size": 72, "tie": False}]
)
def test_a_gguf_gives_the_tensors_and_config_of_the_folder_it_was_made_from(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    folder = make_tiny_llama(tmp_path / "model", **shape)
    write_tiny_gguf(folder, tmp_path / "model.gguf")
    original, converted = load_checkpoint(folder), load_checkpoint(tmp_path / "model.gguf")
    for name, weight in weights(folder).items():
        np.testing.assert_array_equal(converted.tensor(name), weight)
    converted.check_all_used()
    assert {**vars(converted.config), "rms_norm_eps": 0} == {**vars(original.config), "rms_norm_eps": 0}
    assert converted.config.rms_norm_eps == np.float32(1e-5)  # metadata is float32


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.startswith(("gpt2", "mistral"))])
def test_a_gguf_of_each_architecture_gives_the_tensors_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = make_tiny_model(tmp_path / "model", **ARCHITECTURES[name] | {"rope_theta": 1e4})
    write_tiny_gguf(folder, tmp_path / "model.gguf", ggml__pre="qwen2")
    original, converted = load_checkpoint(folder), load_checkpoint(tmp_path / "model.gguf")
    for tensor, weight in weights(folder).items():
        np.testing.assert_array_equal(converted.tensor(tensor), weight)
    converted.check_all_used()
    for switch in ("architecture", "head_dim", "qkv_bias", "o_proj_bias", "mlp_bias", "qk_norm"):
        assert getattr(converted.config, switch) == getattr(original.config, switch)


GGUF_YARN = {
    "llama__rope__scaling__type": "yarn",
    "llama__rope__scaling__factor": 4.0,
    "llama__rope__scaling__original_context_length": 32,
}


@pytest.mark.parametrize(
    ("metadata", "fields"),
    [
        ({"llama__rope__scaling__type": "none"}, {}),
        ({"llama__rope__scale_linear": 2.0}, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        (GGUF_YARN, {"rope_scaling": YARN}),
        (
            GGUF_YARN
            | {"llama__rope__scaling__yarn_beta_fast": 8.0, "llama__rope__scaling__attn_factor": 1.0},
            {"rope_scaling": YARN | {"beta_fast": 8.0}},
        ),
    ],
)
def test_b59_the_rope_scaling_of_a_gguf_is_that_of_a_folder(
    folder: Path, tmp_path: Path, metadata: dict[str, Any], fields: dict[str, Any]
) -> None:
    write_tiny_gguf(folder, tmp_path / "x.gguf", **metadata)
    converted = load_checkpoint(tmp_path / "x.gguf").config
    expected = load_checkpoint(change(folder, **fields)).config
    assert converted.rope_scaling == expected.rope_scaling
    assert converted.max_position_embeddings == expected.max_position_embeddings


def test_a_gguf_scaled_by_a_table_says_what_to_use_instead(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(folder, weights(folder) | {"rope.freqs.weight": np.ones(8, np.float32)})
    monkeypatch.setitem(tiny_gguf.NAMES, "rope.freqs", "rope_freqs")
    write_tiny_gguf(folder, tmp_path / "x.gguf")
    assert "rope scaling by a table (rope_freqs.weight; the Hugging Face folder" in refusal(
        tmp_path / "x.gguf"
    )


def test_q_and_k_left_in_the_order_of_the_gguf_would_be_other_values(
    folder: Path, gguf_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "undo_rope_permutation", lambda weight, _: weight)
    checkpoint = load_checkpoint(gguf_path)
    different = {
        name
        for name, weight in weights(folder).items()
        if not np.array_equal(checkpoint.tensor(name), weight)
    }
    assert different == {name for name in weights(folder) if "q_proj" in name or "k_proj" in name}


def test_the_permutation_is_that_of_one_head_at_a_time() -> None:
    rows = np.array([[0], [4], [1], [5], [2], [6], [3], [7], [10], [14], [11], [15], [12], [16], [13], [17]])
    assert gguf_file.undo_rope_permutation(rows, 2).ravel().tolist() == [*range(8), *range(10, 18)]


def random_blocks(weight: np.ndarray, qtype: QType) -> np.ndarray:
    """Blocks of a type that the library can read but not write."""
    block_size, type_size = gguf.GGML_QUANT_SIZES[qtype]
    rows, columns = weight.shape
    blocks = np.random.default_rng(0).integers(
        0, 56, (rows, columns // block_size * type_size)
    )  # no NaN as float16
    return blocks.astype(np.uint8)


@pytest.mark.parametrize(
    "qtype",
    [
        QType.F32,
        QType.F16,
        QType.BF16,
        QType.Q8_0,
        QType.Q4_0,
        QType.Q4_1,
        QType.Q5_0,
        QType.Q5_1,
        QType.Q4_K,
        QType.Q6_K,
    ],
    ids=lambda qtype: qtype.name,
)
def test_every_type_is_dequantised_as_the_gguf_library_does_it(tmp_path: Path, qtype: QType) -> None:
    folder = make_tiny_llama(tmp_path / "m", hidden_size=256, num_layers=1, intermediate_size=256)
    quantize = random_blocks if qtype.name.endswith("_K") else gguf.quants.quantize
    stored = write_tiny_gguf(folder, tmp_path / "m.gguf", qtype, quantize)
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    expected = gguf.dequantize(stored["blk.0.ffn_gate.weight"], qtype)
    np.testing.assert_array_equal(checkpoint.tensor(GATE), expected)
    query = gguf.dequantize(stored["blk.0.attn_q.weight"], qtype)
    # Undone row by row: GGUF row 2i of a head is its row i, row 2i + 1 its row i + D/2.
    rows = [h * 64 + 2 * (i % 32) + i // 32 for h in range(4) for i in range(64)]
    np.testing.assert_array_equal(checkpoint.tensor("model.layers.0.self_attn.q_proj.weight"), query[rows])


def test_q4_1_is_a_scale_and_a_minimum_for_every_32_weights(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "m", num_layers=1)
    stored = write_tiny_gguf(folder, tmp_path / "m.gguf", QType.Q4_1)[
        "blk.0.ffn_gate.weight"
    ]  # [F, C/32*20] bytes
    blocks = stored.reshape(128, 2, 20)
    scale, minimum = (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)  # [F, C/32, 32]
    expected = (nibbles.astype(np.float32) * scale + minimum).reshape(128, 64)
    np.testing.assert_array_equal(load_checkpoint(tmp_path / "m.gguf").tensor(GATE), expected)


def test_a_gguf_is_converted_once(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_checkpoint(gguf_path)
    monkeypatch.setattr(gguf_file, "convert_gguf", None)
    load_checkpoint(gguf_path)
    load_tokenizer(gguf_path)


def test_all_converted_files_may_be_read_by_the_same_people(gguf_path: Path) -> None:
    assert len({file.stat().st_mode for file in model_folder(gguf_path).iterdir()}) == 1


def test_a_second_load_imports_neither_gguf_nor_torch(gguf_path: Path) -> None:
    load_checkpoint(gguf_path)
    program = (
        "import sys; from pathlib import Path\n"
        "from reference.frontend.checkpoint import load_checkpoint\n"
        "from reference.frontend.tokenizer import load_tokenizer\n"
        f"path = Path({str(gguf_path)!r})\n"
        f"load_checkpoint(path).tensor({Q!r}); load_tokenizer(path).encode('tent')\n"
        "print(sorted({'gguf', 'torch', 'transformers'} & sys.modules.keys()))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_gguf_that_changed_is_converted_anew(folder: Path, gguf_path: Path, tmp_path: Path) -> None:
    before = load_checkpoint(gguf_path).tensor(Q).copy()
    write_tiny_gguf(make_tiny_llama(tmp_path / "other", seed=1), gguf_path)
    os.utime(gguf_path, ns=(1, 1))
    assert not np.array_equal(load_checkpoint(gguf_path).tensor(Q), before)


def test_several_that_need_a_gguf_at_once_convert_it_once(
    gguf_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    convert = gguf_file.convert_gguf

    def counted(path: Path, folder: Path) -> None:
        calls.append(path)
        convert(path, folder)

    monkeypatch.setattr(gguf_file, "convert_gguf", counted)
    barrier = threading.Barrier(3)
    folders = []

    def use() -> None:
        barrier.wait()
        folders.append(model_folder(gguf_path))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(folders) == 3
    assert len(set(folders)) == 1


def nothing_is_left(home: Path) -> bool:
    return {path.name for path in home.rglob("*")} <= {".lock"}


@pytest.mark.parametrize("step", ["weights", "tokenizer"])
def test_a_disk_that_fills_up_while_converting_leaves_nothing(
    gguf_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full_safetensors(_: Any, file: Path, **__: Any) -> None:
        file.write_bytes(b"half")
        raise gguf_file.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    def full_text(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if step == "weights":
        monkeypatch.setattr(gguf_file, "save_file", full_safetensors)
    else:
        monkeypatch.setattr(Path, "write_text", full_text)
    assert "disk is full: free some space" in refusal(gguf_path)
    assert nothing_is_left(home)


def test_a_write_that_the_system_really_refuses_leaves_nothing(gguf_path: Path, home: Path) -> None:
    program = (
        "import resource, signal; from pathlib import Path\n"
        "from reference.frontend.checkpoint import load_checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"load_checkpoint(Path({str(gguf_path)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert f"ModelError: The cache folder {home} cannot be written (File too large)" in done.stderr
    assert nothing_is_left(home)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported; supported: llama, qwen2, qwen3"),
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope', which is not supported"),
        ({"llama__rope__scaling__type": "yarn"}, "lacks the factor of its rope scaling"),
        (
            GGUF_YARN | {"llama__rope__scaling__attn_factor": 0.5},
            "rope scaling 'yarn' with attn_factor, which is not supported",
        ),
        (
            {"llama__attention__sliding_window": 64, "llama__attention__sliding_window_pattern": 2},
            "sliding-window attention in some layers and full attention in others",
        ),
        ({"rope__dimension_count": 8}, "only a part of each head"),
        ({"block_count": None}, r"lacks the metadata 'llama\.block_count'"),
        ({"attention__head_count": 0}, "damaged or incomplete"),
        ({"attention__head_count": [4, 4]}, "damaged or incomplete"),
        ({"attention__head_count": 5, "key_length": 16}, "damaged or incomplete"),
        ({"attention__head_count_kv": 64}, "damaged or incomplete"),
        ({"block_count": "two"}, "num_hidden_layers must be an integer"),
        ({"context_length": 2**31}, "max_position_embeddings must be an integer"),
        ({"ggml__tokens": None}, "tokenizer is damaged"),
        ({"ggml__pre": "unheard-of"}, "pre-tokenizer 'unheard-of' is not supported"),
    ],
)
def test_a_gguf_that_cannot_be_served_is_refused(
    folder: Path, tmp_path: Path, metadata: dict[str, Any], sentence: str
) -> None:
    write_tiny_gguf(folder, tmp_path / "x.gguf", **metadata)
    with pytest.raises(ModelError, match=sentence) as caught:
        load_checkpoint(tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)


def test_a_gguf_tensor_that_a_llama_does_not_have_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny_gguf.NAMES, "mlp.up_proj", "ffn_up_exps")
    write_tiny_gguf(folder, tmp_path / "x.gguf")
    assert "the tensor 'blk.0.ffn_up_exps.weight', which a llama model does not have" in refusal(
        tmp_path / "x.gguf"
    )


def test_a_file_that_is_missing_or_no_gguf_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert "x.gguf cannot be read (No such file or directory)" in refusal(path)
    for content in (b"", b"GG", b"PK\x03\x04 a zip file"):
        path.write_bytes(content)
        assert "x.gguf is not a GGUF file" in refusal(path)


def test_a_gguf_cut_off_anywhere_is_refused_and_leaves_nothing(gguf_path: Path, home: Path) -> None:
    content = gguf_path.read_bytes()
    for size in {4, 5, 8, 12, 23, 24, 40, len(content) - 1, *range(100, len(content), len(content) // 40)}:
        gguf_path.write_bytes(content[:size])
        assert "is damaged or cut off" in refusal(gguf_path)
    assert nothing_is_left(home)


def header(num_tensors: int = 0, num_entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


def string(text: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode()


ARRAY, STRING, UINT8 = 9, 8, 0
HOSTILE = {
    "version": header(version=1),
    "version of the future": header(version=99),
    "more tensors than bytes": header(num_tensors=2**62),
    "more metadata than bytes": header(num_entries=2**62),
    "a name longer than the file": header(0, 1) + string("x", 2**63),
    "a name that wraps around": header(0, 1) + string("x", 2**64 - 1),
    "an array longer than the file": header(0, 1) + string("x") + struct.pack("<IIQ", ARRAY, UINT8, 2**62),
    "an array of texts longer than the file": header(0, 1)
    + string("x")
    + struct.pack("<IIQ", ARRAY, STRING, 2**62),
    "an unknown metadata type": header(0, 1) + string("x") + struct.pack("<IQ", 77, 0),
    "the same name twice": header(0, 2) + 2 * (string("x") + struct.pack("<IB", UINT8, 1)),
    "a name that is not UTF-8": header(0, 1)
    + struct.pack("<Q", 2)
    + b"\xff\xfe"
    + struct.pack("<IB", UINT8, 1),
    "a tensor beyond the end": header(1) + string("t") + struct.pack("<IQIQ", 1, 4, 0, 2**40),
    "a tensor whose address wraps": header(1) + string("t") + struct.pack("<IQIQ", 1, 4, 0, 2**64 - 32),
    "a tensor whose size wraps": header(1)
    + string("t")
    + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0)
    + b"\0" * 64,
    "more dimensions than bytes": header(1) + string("t") + struct.pack("<I", 2**31),
    "an unknown tensor type": header(1) + string("t") + struct.pack("<IQIQ", 1, 4, 999, 0) + b"\0" * 64,
    "an alignment of zero": header(0, 1) + string("general.alignment") + struct.pack("<II", 4, 0),
    "an alignment that is no power of two": header(0, 1)
    + string("general.alignment")
    + struct.pack("<II", 4, 24),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_gguf_that_lies_about_its_content_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert "is damaged or cut off" in refusal(path)


def test_the_bounds_check_sits_where_the_gguf_library_reads() -> None:
    assert callable(gguf.GGUFReader._get)
    assert gguf_file._BoundedReader._get is not gguf.GGUFReader._get


def test_flipped_bytes_in_a_gguf_end_in_a_model_or_in_one_sentence(gguf_path: Path) -> None:
    content = gguf_path.read_bytes()
    random = np.random.default_rng(0)
    sentences = []
    for attempt in range(150):
        damaged = bytearray(content)
        for position in random.integers(4, 1500, 2):
            damaged[position] = random.integers(256)
        gguf_path.write_bytes(damaged)
        os.utime(
            gguf_path, ns=(attempt, attempt)
        )  # the clock of the file system is too coarse to tell them apart
        try:
            load_checkpoint(gguf_path)
        except ModelError as error:
            sentences.append(str(error))
    assert 20 < len(sentences) < 150
    assert not any("\n" in sentence for sentence in sentences)


# The embedded model


@pytest.mark.embedded
def test_the_embedded_model_has_the_config_of_the_contract() -> None:
    config = load_checkpoint(resolve_model("smollm2-135m")).config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert (config.rope_theta, config.tie_word_embeddings) == (100_000.0, True)
    assert config.rms_norm_eps == np.float32(1e-5)
    assert f"{config.rms_norm_eps:.7e}" == "9.9999997e-06"
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
