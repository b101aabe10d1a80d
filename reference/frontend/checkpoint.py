"""Reading weights: a Hugging Face style folder, memory-mapped; a GGUF file is converted to one first, once.

Only safetensors and GGUF are read. Formats that can run code (`.bin`, `.pt`, anything with pickle) are refused, and no
code is ever imported from a model's folder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from reference.contracts.config import ModelConfig
from reference.contracts.protocols import PackedTensor
from reference.frontend.model_config import parse_model_config
from reference.frontend.model_store import ModelError, cache_dir, identity, publish, writing_to_cache
from reference.frontend.packed_file import PACKED_FILE, parse_packed

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_MAX_HEADER_BYTES = 100 * 1024**2  # the safetensors format's own limit
# What older files carry along although it follows from the config: frequencies, and GPT-2's causal masks.
_LEFTOVERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_CONVERSION = 2  # version of what a GGUF file becomes; raise it when the result changes


def model_folder(path: Path) -> Path:
    """The folder to read a model from: `path` itself, or the converted form of a GGUF file.

    The conversion is made on first use and kept in the cache.

    Raises:
        ModelError: the GGUF file cannot be read, or the cache cannot be written.
    """
    if path.is_dir():
        return path
    try:
        key = hashlib.sha256(f"{_CONVERSION} {identity(path)}".encode()).hexdigest()[:16]
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error
    folder = cache_dir() / "converted" / f"{path.stem}-{key}"
    if not folder.is_dir():
        from reference.frontend.gguf_file import convert_gguf  # slow to import, and seldom needed

        with writing_to_cache() as scratch:
            if not folder.is_dir():  # another process may have made it while this one waited
                new = scratch / folder.name
                new.mkdir()
                convert_gguf(path, new)
                publish(new, folder)
    return folder


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
        self._packed = _read_packed(folder / PACKED_FILE)
        for file in _weight_files(folder):
            self._open(file)
        self._unused = set(self._tensors)

    def tensor(self, name: str) -> np.ndarray:
        """float32; a view of the file where it is stored as such. Raises ModelError: it is missing or misshapen."""
        stored = self._stored(name)
        if name in self._is_bf16:
            return (stored.astype(np.uint32) << 16).view(
                np.float32
            )  # bfloat16 is the upper half of a float32
        return np.require(
            stored, np.float32, ["C", "A"]
        )  # the format does not promise that tensors are aligned

    def packed_tensor(self, name: str) -> PackedTensor | None:
        """A view of the file. Raises ModelError: it is missing or misshapen."""
        stored = self._stored(name)
        if stored.ndim != 2:
            return None
        if name in self._packed:
            packed = self._packed[name]
            if (len(packed.rows), packed.in_features) != stored.shape:
                raise ModelError(
                    f"{self.folder / PACKED_FILE} is damaged: {name} has another shape there; delete {self.folder}."
                )
            return packed
        kind = "BF16" if name in self._is_bf16 else {4: "F32", 2: "F16"}[stored.itemsize]
        return PackedTensor(kind, stored.view(np.uint8), stored.shape[1])

    def _stored(self, name: str) -> np.ndarray:
        """The array of the file, known to somebody from now on."""
        if name not in self._tensors:
            raise ModelError(f"The checkpoint in {self.folder} has no tensor {name!r}.")
        stored = self._tensors[name]
        expected = expected_shape(self.config, name)
        if expected is not None and stored.shape != expected:
            raise ModelError(
                f"{name} has the shape {stored.shape}, but {self.folder}/config.json asks for {expected}."
            )
        self._unused.discard(name)
        return stored

    def check_all_used(self) -> None:
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        unknown = sorted(n for n in self._unused - tied if not n.endswith(_LEFTOVERS))
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
                dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
                if dtype not in _DTYPES:
                    raise ModelError(
                        f"{name} in {file} has the type {dtype!r:.20}; F32, F16 and BF16 are supported."
                    )
                if not 0 <= begin <= end <= len(data) or any(n < 0 for n in shape):
                    raise ValueError("it lies outside the file")
                # frombuffer makes no copy, and reshape compares the size with the shape
                tensor = np.frombuffer(data[begin:end], dtype=_DTYPES[dtype]).reshape(shape)
            except ModelError:
                raise
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ModelError(
                    f"{file} is damaged: the tensor {name!r:.100} cannot be read ({error})."
                ) from error
            name = _canonical(self.config, name)
            self._tensors[name] = tensor
            if dtype == "BF16":
                self._is_bf16.add(name)


def _read_packed(file: Path) -> dict[str, PackedTensor]:
    if not file.is_file():
        return {}
    try:
        return parse_packed(*_read_safetensors(file))
    except ModelError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{file} is damaged ({error}); delete {file.parent}.") from error


def _canonical(config: ModelConfig, name: str) -> str:
    """The name under which a tensor is asked for: the first GPT-2 files leave out the name of the whole."""
    if config.architecture == "GPT2LMHeadModel" and not name.startswith(("transformer.", "lm_head.")):
        return f"transformer.{name}"
    return name


def expected_shape(config: ModelConfig, name: str) -> tuple[int, ...] | None:
    """Shape that a tensor must have, None for an unknown name."""
    shapes = _gpt2_shape if config.architecture == "GPT2LMHeadModel" else _llama_shape
    return shapes(config, name)


def _gpt2_shape(config: ModelConfig, name: str) -> tuple[int, ...] | None:
    """Matrices are [in, out]."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte": (config.vocab_size, hidden),
        "transformer.wpe": (config.max_position_embeddings, hidden),
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, ffn),
        "mlp.c_proj": (ffn, hidden),
        "lm_head": (config.vocab_size, hidden),
    }
    module, _, kind = name.rpartition(".")
    shape = shapes.get(".".join(module.split(".")[-2:]))
    if module.endswith((".ln_1", ".ln_2", ".ln_f")):
        shape = (hidden,)
    if shape is None or kind not in ("weight", "bias"):
        return None
    return shape if kind == "weight" else shape[-1:]


def _llama_shape(config: ModelConfig, name: str) -> tuple[int, ...] | None:
    """Matrices are [out, in]; a bias has one number for each row."""
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
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "norm": (hidden,),
    }
    parts = name.split(".")
    shape = shapes.get(parts[-2]) if len(parts) >= 2 else None
    if shape is None or parts[-1] not in ("weight", "bias"):
        return None
    return shape if parts[-1] == "weight" else shape[:1]


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sharded or not."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} has no usable weight_map.")
        # The name only: a shard lies beside its index, and nowhere that a path in it may point to.
        files = [folder / Path(name).name for name in sorted(set(weight_map.values()))]
    else:
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(next(folder.glob(pattern), None) for pattern in ("*.bin", "*.pt", "*.pth"))
        hint = (
            "; .bin and .pt files can run code and are never read, so convert them to safetensors"
            if pickled
            else ""
        )
        raise ModelError(f"{folder} holds no *.safetensors file{hint}.")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{folder} is incomplete: {file.name} is missing; fetch the model again.")
    return files


def _read_safetensors(file: Path) -> tuple[dict[str, Any], memoryview]:
    """(header, data) of a safetensors file, mapped and not read: 8 bytes length, a JSON header, then the tensors."""
    try:
        mapped = np.memmap(file, dtype=np.uint8, mode="r")
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ModelError(f"{file} is empty; fetch the model again.") from error
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if len(mapped) < 8 or length > min(len(mapped) - 8, _MAX_HEADER_BYTES):
        raise ModelError(f"{file} is damaged or cut off: it is no safetensors file of its stated size.")
    try:
        header = json.loads(mapped[8 : 8 + length].tobytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is damaged: its header is not JSON.") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file} is damaged: its header is not a table of tensors.")
    return header, mapped.data[8 + length :]


def read_text(file: Path) -> str:
    """A text file of a model's folder. Raises ModelError when it is missing, unreadable or not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{file.parent} is not a model folder: it has no {file.name}.") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is damaged: it is not UTF-8 text.") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a model's folder. Raises ModelError when it is missing, unreadable or no object."""
    try:
        content = json.loads(read_text(file))
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
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
    generation = folder / "generation_config.json"
    raw_generation = read_json(generation) if generation.is_file() else {}
    try:
        return parse_model_config(raw, raw_generation)
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is not usable: {error}") from error
