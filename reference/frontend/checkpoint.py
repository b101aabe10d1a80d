"""Reading weights: a Hugging Face style folder, memory-mapped; a GGUF file is converted to one first, once.

Only safetensors and GGUF are read. Formats that can run code (`.bin`, `.pt`, anything with pickle) are refused, and no
code is ever imported from a model's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reference.contracts.config import ModelConfig
from reference.frontend.model_store import ModelError

_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_MAX_HEADER_BYTES = 100 * 1024**2  # the safetensors format's own limit


def model_folder(path: Path) -> Path:
    """The folder to read a model from: `path` itself, or the converted form of a GGUF file.

    Raises:
        ModelError: the GGUF file cannot be read.
    """
    if path.is_dir():
        return path
    from reference.frontend.gguf_file import converted_folder

    return converted_folder(path)


def load_checkpoint(path: Path) -> SafetensorsCheckpoint:
    """Open the weights of a folder or GGUF file; nothing is read before it is asked for.

    Raises:
        ModelError: something is missing, damaged or not supported.
    """
    return SafetensorsCheckpoint(model_folder(path))


class SafetensorsCheckpoint:
    """See `contracts.protocols.Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_model_config(folder)
        self._tensors: dict[str, np.ndarray] = {}  # as stored; BF16 as its bit pattern
        self._is_bf16: set[str] = set()
        for file in _weight_files(folder):
            self._open(file)
        self._unused = set(self._tensors)

    def tensor(self, name: str) -> np.ndarray:
        """float32; a view of the file where it is stored as such. Raises ModelError when it is missing or misshapen."""
        if name not in self._tensors:
            raise ModelError(f"The checkpoint in {self.folder} has no tensor {name!r}.")
        stored = self._tensors[name]
        expected = expected_shape(self.config, name)
        if expected is not None and stored.shape != expected:
            raise ModelError(f"{name} has the shape {stored.shape}, but config.json asks for {expected}.")
        self._unused.discard(name)
        if name in self._is_bf16:
            return (stored.astype(np.uint32) << 16).view(np.float32)  # bfloat16 is the upper half of a float32
        return stored.astype(np.float32, copy=False)

    def check_all_used(self) -> None:
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        unknown = sorted(n for n in self._unused - tied if not n.endswith("rotary_emb.inv_freq"))
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise ModelError(
                f"The checkpoint holds tensors that this model does not know: {', '.join(unknown[:3])}{more}; it is "
                f"another kind of model than its config.json says."
            )

    def _open(self, file: Path) -> None:
        header, data = _read_safetensors(file)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                dtype_name, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
                dtype = _DTYPES.get(dtype_name)
                if dtype is None:
                    raise ModelError(f"{name} in {file.name} has the type {dtype_name}; F32, F16 and BF16 are supported.")
                if not 0 <= begin <= end <= len(data) or any(n < 0 for n in shape):
                    raise ValueError("it lies outside the file")
                # frombuffer checks the size against the shape, and makes no copy
                tensor = np.frombuffer(data[begin:end], dtype=dtype).reshape(shape)
            except ModelError:
                raise
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(f"{file} is damaged: tensor {name!r} cannot be read ({error}).") from error
            self._tensors[name] = tensor
            if dtype_name == "BF16":
                self._is_bf16.add(name)


def expected_shape(config: ModelConfig, name: str) -> tuple[int, ...] | None:
    """Shape that a Llama tensor must have, None for an unknown name."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (q, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, q),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "norm": (hidden,),
    }
    parts = name.split(".")
    return shapes.get(parts[-2]) if len(parts) >= 2 and parts[-1] == "weight" else None


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sharded or not."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} has no usable weight_map.")
        files = [folder / Path(name).name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(next(folder.glob(pattern), None) for pattern in ("*.bin", "*.pt", "*.pth"))
        hint = "; .bin and .pt files can run code and are never read: convert them to safetensors" if pickled else ""
        raise ModelError(f"{folder} holds no *.safetensors file{hint}.")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder} is incomplete: {file.name} is missing.")
    return files


def _read_safetensors(file: Path) -> tuple[dict[str, Any], memoryview]:
    """(header, data) of a safetensors file, mapped and not read: 8 bytes length, a JSON header, then the tensors."""
    try:
        mapped = np.memmap(file, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"{file} cannot be read ({error}).") from error
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if len(mapped) < 8 or length > min(len(mapped) - 8, _MAX_HEADER_BYTES):
        raise ModelError(f"{file} is damaged or cut off: it is no safetensors file of its stated size.")
    try:
        header = json.loads(mapped[8 : 8 + length].tobytes())
    except ValueError as error:
        raise ModelError(f"{file} is damaged: its header is not JSON.") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file} is damaged: its header is not a table of tensors.")
    return header, memoryview(mapped)[8 + length :]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a model's folder. Raises ModelError when it is missing, unreadable or no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file.parent} has no {file.name}; it is not a model folder.") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object.")
    return content


def read_model_config(folder: Path) -> ModelConfig:
    """`config.json` (with `generation_config.json`, if there) as a `ModelConfig`.

    Raises:
        ModelError: a field is missing, or asks for something that this engine does not do.
    """
    raw = read_json(folder / "config.json")
    architecture = (raw.get("architectures") or ["unknown"])[0]
    if architecture != "LlamaForCausalLM":
        raise ModelError(f"The architecture {architecture!r} is not supported; supported: LlamaForCausalLM.")
    rope = raw.get("rope_parameters") or {}  # newer transformers put theta and scaling together
    _refuse_unsupported(raw, rope)
    generation = folder / "generation_config.json"
    eos = _token_ids(raw.get("eos_token_id"))
    if generation.is_file():
        eos += [i for i in _token_ids(read_json(generation).get("eos_token_id")) if i not in eos]
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=tuple(eos),
        )
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks the field {error.args[0]!r}.") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{folder / 'config.json'} is not usable: {error}") from error


def _refuse_unsupported(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    scaling = raw.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    unsupported = {
        f"rope scaling {kind!r}": kind != "default",
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        f"the activation {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
    }
    for what, asked in unsupported.items():
        if asked:
            raise ModelError(f"The model needs {what}, which is not supported.")


def _token_ids(value: Any) -> list[int]:
    """`eos_token_id` is absent, a number or a list of numbers."""
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list) else [int(value)]
