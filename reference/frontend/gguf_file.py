"""GGUF files (llama.cpp's format), converted once to a Hugging Face style folder in the cache.

Parsing and dequantising take seconds and the result never changes, so all later starts memory-map the converted file.
What a GGUF does differently from a Hugging Face checkpoint:

- weights may be quantised: a dequantised weight is the model, there is no better one to go back to;
- q and k rows are permuted for llama.cpp's way of rotary embedding (adjacent pairs), which must be undone;
- names differ, and tokenizer and chat template are metadata of the same file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from reference.frontend.model_store import ModelError, cache_dir, writing_to_cache

if TYPE_CHECKING:
    from gguf import GGUFReader

_VERSION = 1  # of the conversion; raise it when its result changes
_MAX_COUNT = 65_536  # tensors, metadata entries

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
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_BROKEN = (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error, MemoryError)


def converted_folder(path: Path) -> Path:
    """The converted form of a GGUF file, made now if it does not exist yet.

    Raises:
        ModelError: the file is damaged, of another architecture, or the cache cannot be written.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error
    identity = f"{_VERSION} {path.resolve()} {status.st_size} {status.st_mtime_ns}"
    folder = cache_dir() / "converted" / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    reader = _open(path)
    with writing_to_cache() as scratch:
        new = scratch / folder.name
        new.mkdir()
        try:
            _convert(reader, new)
        except ModelError:
            raise
        except _BROKEN as error:
            raise ModelError(f"{path} is damaged or incomplete ({type(error).__name__}: {error}).") from error
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(new, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was quicker, with the same result
                raise
    return folder


def _open(path: Path) -> GGUFReader:
    """Check the header before anything is allocated by what it says, then parse."""
    from gguf import GGUFReader

    try:
        with path.open("rb") as file:
            header = file.read(24)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error
    if len(header) < 24 or header[:4] != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file.")
    version, num_tensors, num_entries = struct.unpack("<IQQ", header[4:])
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3 are supported.")
    if num_tensors > _MAX_COUNT or num_entries > _MAX_COUNT:
        raise ModelError(f"{path} is damaged: it claims {num_tensors} tensors and {num_entries} metadata entries.")
    try:
        return GGUFReader(path)
    except _BROKEN as error:
        raise ModelError(f"{path} is damaged or cut off ({type(error).__name__}: {error}).") from error


def _convert(reader: GGUFReader, folder: Path) -> None:
    from safetensors.numpy import save_file

    from reference.frontend.tokenizer import write_tokenizer_from_gguf

    metadata = {name: field for name, field in reader.fields.items()}
    architecture = _get(reader, "general.architecture")
    if architecture != "llama":
        raise ModelError(f"The GGUF architecture {architecture!r} is not supported; supported: llama.")
    config = _config(reader)
    save_file(_tensors(reader, config), folder / "model.safetensors")
    write_tokenizer_from_gguf({name: field.contents for name, field in metadata.items()}, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _get(reader: GGUFReader, name: str, default: Any = None) -> Any:
    field = reader.fields.get(name)
    if field is not None:
        return field.contents()
    if default is None:
        raise ModelError(f"The GGUF file lacks the metadata {name!r}.")
    return default


def _config(reader: GGUFReader) -> dict[str, Any]:
    """The metadata as a Hugging Face `config.json`."""
    if _get(reader, "llama.rope.scaling.type", "none") != "none":
        raise ModelError("The GGUF file asks for rope scaling, which is not supported.")
    heads = _get(reader, "llama.attention.head_count")
    hidden = _get(reader, "llama.embedding_length")
    names = {tensor.name for tensor in reader.tensors}
    (vocab_size,) = [int(tensor.shape[1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": _get(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _get(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _get(reader, "llama.attention.head_count_kv", heads),
        "head_dim": _get(reader, "llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": _get(reader, "llama.context_length"),
        "rms_norm_eps": _get(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _get(reader, "llama.rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": _get(reader, "tokenizer.ggml.bos_token_id", -1),
        "eos_token_id": _get(reader, "tokenizer.ggml.eos_token_id", []),
    }


def _tensors(reader: GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """All weights in float32 under Hugging Face names."""
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in tqdm(reader.tensors, desc="Converting", unit="tensor", disable=None):
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        prefix, _, rest = tensor.name.rpartition(".")
        parts = prefix.split(".")
        kind = parts[-1]
        if kind not in _NAMES or rest != "weight":
            raise ModelError(f"The GGUF file holds the tensor {tensor.name!r}, which a Llama model does not have.")
        if kind in heads:
            weight = undo_rope_permutation(weight, heads[kind])
        name = f"model.layers.{parts[1]}.{_NAMES[kind]}" if parts[0] == "blk" else _NAMES[kind]
        tensors[f"{name}.weight"] = np.ascontiguousarray(weight)
    return tensors


def undo_rope_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of q or k back in Hugging Face order: [out, in] -> [out, in].

    llama.cpp turns adjacent rows (2i, 2i + 1) of a head as a pair, Hugging Face rows (i, i + D/2).
    """
    out, width = weight.shape
    pairs = weight.reshape(num_heads, out // num_heads // 2, 2, width)  # [H, D/2, 2, in]
    return pairs.swapaxes(1, 2).reshape(out, width)
