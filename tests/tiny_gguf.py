"""A tiny random model of the Llama family as a GGUF file, made from its folder as llama.cpp's converter does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NORMAL, CONTROL = 1, 3  # token types

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

Quantize = Callable[[np.ndarray, gguf.GGMLQuantizationType], np.ndarray]


def write_tiny_gguf(
    folder: Path,
    path: Path,
    qtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    quantize: Quantize = gguf.quants.quantize,
    **metadata: Any,
) -> dict[str, np.ndarray]:
    """Write the model in `folder` as a GGUF file; matrices are stored as `qtype`.

    `metadata` replaces entries by the last parts of their names, `.` written as `__` (`ggml__pre="smollm"`); None
    leaves an entry out. Returns the stored bytes by GGUF name.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", config["model_type"]))
    for name, value in _metadata(folder, config, metadata).items():
        _add(writer, name, value)
    stored = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        gguf_name = _gguf_name(name)
        if config["model_type"] == "llama" and "attn_q." in gguf_name:
            weight = permute(weight, config["num_attention_heads"])
        elif config["model_type"] == "llama" and "attn_k." in gguf_name:
            weight = permute(weight, config["num_key_value_heads"])
        kind = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else qtype
        stored[gguf_name] = weight if kind == gguf.GGMLQuantizationType.F32 else quantize(weight, kind)
        writer.add_tensor(gguf_name, stored[gguf_name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: of each head first rows 0 and D/2, then 1 and D/2 + 1, and so on."""
    halves = weight.reshape(num_heads, 2, len(weight) // num_heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def _metadata(folder: Path, config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    merges = [" ".join(merge) for merge in tokenizer["model"]["merges"]]
    own = config["model_type"]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    entries = {
        f"{own}.block_count": config["num_hidden_layers"],
        f"{own}.context_length": config["max_position_embeddings"],
        f"{own}.embedding_length": config["hidden_size"],
        f"{own}.feed_forward_length": config["intermediate_size"],
        f"{own}.attention.head_count": config["num_attention_heads"],
        f"{own}.attention.head_count_kv": config["num_key_value_heads"],
        f"{own}.attention.key_length": head_dim,
        f"{own}.rope.dimension_count": head_dim,
        f"{own}.rope.freq_base": float(config["rope_theta"]),
        f"{own}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocab],
        "tokenizer.ggml.token_type": [CONTROL if i in special else NORMAL for _, i in vocab],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
    }
    for key, value in changes.items():
        name = key.replace("__", ".")
        known = [full for full in entries if full.endswith(f".{name}")]
        entries[known[0] if known else name] = value
    return {name: value for name, value in entries.items() if value is not None}


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    else:
        writer.add_string(name, value)
