"""GGUF files (llama.cpp's format), turned into a Hugging Face style folder.

What a GGUF does differently from a Hugging Face checkpoint:

- weights may be quantised: a dequantised weight is the model, there is no better one to go back to;
- q and k rows of a Llama are permuted for llama.cpp's way of rotary embedding (adjacent pairs), which must be undone;
  those of a Qwen are not;
- names differ, and tokenizer and chat template are metadata of the same file.

Parsing and dequantising take seconds and the result never changes: `checkpoint.model_folder` keeps it in the cache.
Source: the format's specification, `docs/gguf.md` of ggml.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tqdm.auto import tqdm

from reference.frontend.gguf_tokenizer import write_tokenizer
from reference.frontend.model_store import ModelError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# What the gguf library raises on a file that is not what it claims to be.
_BROKEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, struct.error, MemoryError)


class _BoundedReader(GGUFReader):
    """Refuses to read past the end of the file.

    The library takes what is there instead, possibly nothing, and would go on as often as a damaged count tells it to.
    """

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> np.ndarray:
        values: np.ndarray = super()._get(offset, dtype, count, override_order)
        if len(values) != count:
            raise ValueError("it ends too early")
        return values


def convert_gguf(path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (float32), tokenizer.json and tokenizer_config.json into `folder`.

    Raises:
        ModelError: the file is damaged, or holds something that is not supported.
        OSError: `folder` cannot be written.
    """
    reader = _open(path)
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        config = _config(metadata, reader.tensors)
        tensors = _tensors(reader.tensors, config)
        write_tokenizer(metadata, folder)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except _BROKEN as error:
        raise ModelError(f"{path} is damaged or incomplete ({_reason(error)}).") from error
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights_file = folder / "model.safetensors"
    _save(tensors, weights_file)
    weights_file.chmod(config_file.stat().st_mode)  # the library makes it private; a cache may be shared


def _open(path: Path) -> GGUFReader:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
        with np.errstate(over="raise"):  # an offset near 2^64 would wrap and point into the file again
            return _BoundedReader(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}).") from error
    except ModelError:
        raise
    except _BROKEN as error:
        raise ModelError(f"{path} is damaged or cut off ({_reason(error)}).") from error


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")[:200]


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    if name not in metadata:
        raise ModelError(f"the GGUF file lacks the metadata {name!r}.")
    return metadata[name]


def _config(metadata: Mapping[str, Any], tensors: Sequence[ReaderTensor]) -> dict[str, Any]:
    """The metadata as a Hugging Face `config.json`."""
    architecture = _required(metadata, "general.architecture")
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ModelError(f"the GGUF architecture {architecture!r} is not supported; supported: {supported}.")
    # Of this architecture, without its name in front.
    own = {name.removeprefix(f"{architecture}."): value for name, value in metadata.items()}
    names = {tensor.name for tensor in tensors}
    heads = _required(metadata, f"{architecture}.attention.head_count")
    hidden = _required(metadata, f"{architecture}.embedding_length")
    head_dim = own.get("attention.key_length", hidden // heads)
    context = _required(metadata, f"{architecture}.context_length")
    _refuse_unsupported(own, names, head_dim)
    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise ModelError("the GGUF file lacks the tensor 'token_embd.weight'.")
    # A chat model may end its turn (eot) with another token than a text (eos).
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    window = own.get("attention.sliding_window") or context  # 0 is none
    # A Llama with a window is what Hugging Face calls a Mistral; llama.cpp has one name for both.
    is_mistral = architecture == "llama" and window < context
    return {
        "architectures": ["MistralForCausalLM" if is_mistral else _ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": int(embedding.shape[1]),  # GGUF counts the innermost dimension first
        "hidden_size": hidden,
        "intermediate_size": _required(metadata, f"{architecture}.feed_forward_length"),
        "num_hidden_layers": _required(metadata, f"{architecture}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": _required(metadata, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "rope_theta": own.get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(own),
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "sliding_window": window,
        "use_sliding_window": window < context,
        "max_window_layers": 0,  # the window holds for all layers from this one on
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }


def _refuse_unsupported(own: Mapping[str, Any], names: set[str], head_dim: int) -> None:
    unsupported = {
        "rotary embedding of only a part of each head": own.get("rope.dimension_count", head_dim) != head_dim,
        "sliding-window attention in some layers and full attention in others": (
            "attention.sliding_window_pattern" in own
        ),
        # Llama 3.1 and later: the file holds only what its scaling comes to, as numbers to divide by.
        "rope scaling by a table (rope_freqs.weight; the Hugging Face folder says it in a form that is supported)": (
            "rope_freqs.weight" in names
        ),
    }
    for what, asked in unsupported.items():
        if asked:
            raise ModelError(f"the model needs {what}, which is not supported.")


def _rope_scaling(own: Mapping[str, Any]) -> dict[str, Any] | None:
    """As in a `config.json`; what the file leaves out has the same default there as in llama.cpp."""
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear"))  # the older name knew only one type
    kind = own.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind == "none":
        return None
    adjusted = [name for name in _YARN_ADJUSTMENTS if own.get(f"rope.scaling.{name}", 1.0) != 1.0]
    if kind not in ("linear", "yarn") or adjusted:
        what = " with ".join([repr(kind), *adjusted])
        raise ModelError(f"the model needs rope scaling {what}, which is not supported.")
    if factor is None:
        raise ModelError("the GGUF file lacks the factor of its rope scaling ('rope.scaling.factor').")
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
        "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": own.get("rope.scaling.yarn_beta_slow"),
    }


# Factors by which llama.cpp departs from the paper's formula; 1 leaves it as it is.
_YARN_ADJUSTMENTS = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier", "alpha")


def _tensors(stored: Sequence[ReaderTensor], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All weights in float32 under Hugging Face's names."""
    architecture = config["model_type"]
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if architecture != "llama":
        permuted = {}
    tensors = {}
    for tensor in tqdm(stored, desc="Converting", unit="tensor", disable=None):
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
        if match is None or match[2] not in _NAMES:
            raise ModelError(
                f"the GGUF file holds the tensor {tensor.name!r:.100}, which a {architecture} model does not have."
            )
        layer, kind, part = match.groups()
        try:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError:
            raise ModelError(
                f"the type {tensor.tensor_type.name} of {tensor.name} cannot be dequantised."
            ) from None
        if kind in permuted:
            rows = weight.reshape(len(weight), -1)  # [out, in], or [out, 1] of a bias
            weight = undo_rope_permutation(rows, permuted[kind]).reshape(weight.shape)
        name = _NAMES[kind] if layer is None else f"model.layers.{layer}.{_NAMES[kind]}"
        tensors[f"{name}.{part}"] = np.ascontiguousarray(weight)
    return tensors


def undo_rope_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of q or k back in Hugging Face's order: [out, in] -> [out, in].

    llama.cpp turns adjacent rows (2i, 2i + 1) of a head as a pair, Hugging Face rows (i, i + D/2).
    """
    out, width = weight.shape
    pairs = weight.reshape(num_heads, out // num_heads // 2, 2, width)  # [H, D/2, 2, in]
    return pairs.swapaxes(1, 2).reshape(out, width)


def _save(tensors: dict[str, np.ndarray], file: Path) -> None:
    """Write a safetensors file. Its library has an exception of its own for what is an OSError."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})  # transformers wants to be told, whoever wrote it
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code)) from error
