"""The one model in the forms that the engines read. Each is made once and kept in the cache folder.

All of them hold the same weights: those of the GGUF file, dequantised where an engine wants another type. F16 and Q8_0
round them once more; the table says which engine gets which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, dequantize, quantize

from fast.bench.peers.process import PeerError
from reference.frontend.checkpoint import model_folder
from reference.frontend.model_store import cache_dir, identity, publish, writing_to_cache
from reference.frontend.packed_file import PACKED_FILE

_VERSION = 2  # raise it when a form changes
_FILE_TYPES = {
    GGMLQuantizationType.F16: LlamaFileType.MOSTLY_F16,
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}


def float32_folder(path: Path) -> Path:
    """A folder in Hugging Face's format whose matrices are float32 only."""
    folder = model_folder(path)
    if not (folder / PACKED_FILE).exists():
        return folder

    def link(target: Path) -> None:
        target.mkdir()
        for file in folder.iterdir():
            if file.name != PACKED_FILE:
                (target / file.name).symlink_to(file)

    return kept(path, "float32", link)


def gguf_file(path: Path) -> Path:
    """The file itself. Raises PeerError: the model is a folder."""
    if path.is_dir():
        raise PeerError("it reads GGUF files, and the model is a folder")
    return path


def requantised(path: Path, kind: GGMLQuantizationType) -> Path:
    """A GGUF file like this one, its matrices in another type. Raises PeerError: the model is a folder."""
    source = gguf_file(path)
    return kept(path, f"{kind.name}.gguf", lambda target: write_gguf(source, target, kind))


def kept(path: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The form `name` of the model at `path`, made by `make` when it is not there yet."""
    key = hashlib.sha256(f"{_VERSION} {identity(path)}".encode()).hexdigest()[:12]
    target = cache_dir() / "peers" / "models" / f"{path.stem}-{key}-{name}"
    if not target.exists():
        with writing_to_cache() as scratch:
            make(scratch / target.name)
            publish(scratch / target.name, target)
    return target


def write_gguf(source: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """Copy a GGUF file, matrices turned into `kind` and vectors left as they are."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(_FILE_TYPES[kind])
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # what the writer adds by itself, and the type, which changes
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)  # float32 [out, in] or [out]
        wanted = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
