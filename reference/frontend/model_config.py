"""What a `config.json` says, as a `ModelConfig`.

A field that is absent has the default of its architecture in transformers, because its authors' file was written
against that; `null` is not absent, it means "derived" or "none". What the engine does not do is refused here, by name:
a model that is half understood gives wrong text and no error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from reference.contracts.config import ModelConfig, RopeScaling

_MAX_INTEGER = 2**24  # beyond every real model, and small enough for sizes computed from it
_MAX_NUMBER = 1e30  # of theta and the like: float32 ends at 3e38

_DEFAULTS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
_FULL, _SLIDING = "full_attention", "sliding_attention"  # in `layer_types`


def parse_model_config(raw: Mapping[str, Any], raw_generation: Mapping[str, Any]) -> ModelConfig:
    """`config.json` and `generation_config.json`, as parsed JSON, as a `ModelConfig`.

    Raises:
        ValueError: a field is missing or impossible, or asks for something that this engine does not do.
    """
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(architecture, str) or architecture not in _DEFAULTS:
        raise ValueError(
            f"the architecture {architecture!r:.100} is not supported; supported: {', '.join(sorted(_DEFAULTS))}."
        )
    raw = _DEFAULTS[architecture] | dict(raw)
    eos = _token_ids("eos_token_id", raw.get("eos_token_id"))
    eos += _token_ids("eos_token_id", raw_generation.get("eos_token_id"))
    bos = _token_ids("bos_token_id", raw.get("bos_token_id"))
    parse = _gpt2_config if architecture == "GPT2LMHeadModel" else _llama_config
    return parse(architecture, raw, bos[0] if bos else None, tuple(dict.fromkeys(eos)))


def _llama_config(
    architecture: str, raw: Mapping[str, Any], bos: int | None, eos: tuple[int, ...]
) -> ModelConfig:
    hidden, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    max_position = _integer(raw, "max_position_embeddings")
    rope = _rope_parameters(raw)
    scaling, max_position = _rope_scaling(rope, max_position)
    _refuse_unsupported(raw)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    has_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(raw.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_hidden_layers=_integer(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_integer(raw, "num_key_value_heads", heads),
        head_dim=_integer(raw, "head_dim", hidden // heads),
        max_position_embeddings=max_position,
        rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        rope_theta=_positive(rope, "rope_theta", 10_000.0),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=bos,
        eos_token_ids=eos,
        rope_scaling=scaling,
        qkv_bias=is_qwen2 or has_bias,
        o_proj_bias=has_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias")),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(raw, max_position),
    )


def _gpt2_config(
    architecture: str, raw: Mapping[str, Any], bos: int | None, eos: tuple[int, ...]
) -> ModelConfig:
    activation = raw["activation_function"]
    _refuse(
        {
            f"the activation {activation!r:.50}": activation not in ("gelu_new", "gelu_pytorch_tanh"),
            "attention without scaling (scale_attn_weights)": not raw["scale_attn_weights"],
            "scaling by layer (scale_attn_by_inverse_layer_idx)": raw.get("scale_attn_by_inverse_layer_idx"),
            "cross-attention": raw.get("add_cross_attention"),
            "quantised weights (quantization_config)": raw.get("quantization_config"),
        }
    )
    hidden, heads = _integer(raw, "n_embd"), _integer(raw, "n_head")
    if hidden % heads:
        raise ValueError(f"n_embd ({hidden}) must be a multiple of n_head ({heads}).")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "n_inner", 4 * hidden),
        num_hidden_layers=_integer(raw, "n_layer"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=_integer(raw, "n_positions"),
        rms_norm_eps=_positive(raw, "layer_norm_epsilon"),
        rope_theta=0.0,
        tie_word_embeddings=bool(raw["tie_word_embeddings"]),
        bos_token_id=bos,
        eos_token_ids=eos,
        qkv_bias=True,
        o_proj_bias=True,
        mlp_bias=True,
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act") or "silu"
    _refuse(
        {
            f"the activation {activation!r:.50}": activation != "silu",
            "quantised weights (quantization_config)": raw.get("quantization_config"),
        }
    )


def _refuse(unsupported: Mapping[str, Any]) -> None:
    """Name the first thing that the config asks for."""
    for what, asked in unsupported.items():
        if asked:
            raise ValueError(f"the model needs {what}, which is not supported.")


def _sliding_window(raw: Mapping[str, Any], max_position: int) -> int | None:
    """How many tokens every layer sees, the newest included; None if that hides nothing from any sequence.

    Mistral's window holds for all layers, Qwen's only with `use_sliding_window`. A window of some layers alone is
    refused: the others need every block, so that none could be given back.
    """
    architecture = raw["architectures"][0]
    is_on = architecture == "MistralForCausalLM" or (
        architecture.startswith("Qwen") and bool(raw.get("use_sliding_window"))
    )
    window = _integer(raw, "sliding_window") if is_on and raw.get("sliding_window") is not None else None
    kinds = _layer_kinds(raw, window is not None)
    if window is None:
        if _SLIDING in kinds:
            raise ValueError("layer_types names 'sliding_attention', but the config switches no window on.")
        return None
    if window >= max_position or kinds == {_FULL}:
        return None
    _refuse({"sliding-window attention in some layers and full attention in others": _FULL in kinds})
    return window


def _layer_kinds(raw: Mapping[str, Any], has_window: bool) -> set[str]:
    """The types of attention that the layers have between them."""
    layer_types = raw.get("layer_types") or ()
    if not isinstance(layer_types, list | tuple) or any(k not in (_FULL, _SLIDING) for k in layer_types):
        raise ValueError(f"the model needs layers of the types {layer_types!r:.100}, which is not supported.")
    if raw["architectures"][0] == "MistralForCausalLM":
        # Its code has the window in every layer: a list that says otherwise is a contradiction.
        return {*layer_types, _SLIDING} if has_window else set(layer_types)
    if layer_types:
        return set(layer_types)
    if not has_window:
        return {_FULL}
    first = raw["max_window_layers"]  # the window holds from this layer on
    if isinstance(first, bool) or not isinstance(first, int):
        raise ValueError(f"max_window_layers must be an integer, got {first!r:.50}.")
    return {_FULL if layer < first else _SLIDING for layer in range(_integer(raw, "num_hidden_layers"))}


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Theta and scaling in one table, as newer configs have them; older ones have `rope_theta` and `rope_scaling`."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if not isinstance(new, dict) or not isinstance(old, dict):
        raise ValueError("rope_parameters and rope_scaling must be tables.")
    rope = dict(old or new)
    for place in (new, raw):
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = place.get("rope_theta")
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("the model needs a rotary embedding for each type of layer, which is not supported.")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1):
        raise ValueError(
            "the model needs rotary embedding of only a part of each head, which is not supported."
        )
    return rope


def _rope_scaling(rope: Mapping[str, Any], max_position: int) -> tuple[RopeScaling | None, int]:
    """The scaling, and the longest sequence it makes possible.

    As in vLLM: `factor` times the length before scaling, which yarn's table states and a linear one takes from
    `max_position_embeddings`; a llama3 config already states the result.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None, max_position
    if kind == "linear":
        factor = _positive(rope, "factor")
        return RopeScaling("linear", factor), _scaled(max_position, factor)
    original = _integer(rope, "original_max_position_embeddings", max_position)
    if kind == "llama3":
        low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
        factor = _positive(rope, "factor")
        scaling = RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
        return scaling, max_position
    if kind != "yarn":
        raise ValueError(f"the model needs rope scaling {kind!r:.50}, which is not supported.")
    factor = _positive(rope, "factor", max_position / original)
    scaling = RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=_positive(rope, "beta_fast", 32.0),
        beta_slow=_positive(rope, "beta_slow", 1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_positive(rope, "attention_factor", _yarn_attention_factor(rope, factor)),
    )
    return scaling, _scaled(original, factor)


def _scaled(length: int, factor: float) -> int:
    scaled = int(min(length * factor, _MAX_INTEGER + 1))
    return _integer({"max_position_embeddings": scaled}, "max_position_embeddings")


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """The paper's recommendation, 0.1 ln(factor) + 1, or the ratio of two such that DeepSeek's configs give."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0

    if not rope.get("mscale") or not rope.get("mscale_all_dim"):
        return temperature(1.0)
    return temperature(_positive(rope, "mscale")) / temperature(_positive(rope, "mscale_all_dim"))


def _integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ValueError(f"the field {name!r} is missing.")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INTEGER:
        raise ValueError(f"{name} must be an integer from 1 to {_MAX_INTEGER}, got {value!r:.50}.")
    return value


def _positive(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise ValueError(f"the field {name!r} is missing.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_NUMBER:
        raise ValueError(f"{name} must be a positive number, got {value!r:.50}.")
    return float(value)


def _token_ids(name: str, value: Any) -> list[int]:
    """Absent, one id or several, as `config.json` writes them."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"{name} must be a token id or a list of them, got {value!r:.50}.")
    return ids
