"""Environments of other engines, in the cache folder: their pins contradict each other's, and this project's.

Each is made once with pip, and made again when what it should hold has changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fast.bench.peers.process import PeerError
from reference.frontend.model_store import cache_dir

# Only the build for the CPU: the usual one brings gigabytes of CUDA along.
TORCH = "torch==2.13.0+cpu"

# What a package needs but for some names, as requirements that pip reads. Run by the environment's own Python.
_NEEDS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires(sys.argv[1]):
    need = Requirement(line)
    if need.name not in sys.argv[2:] and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
"""


@dataclass(frozen=True)
class Environment:
    """What an engine's environment holds.

    Args:
        name: of its folder.
        packages: installed in this order, each with a pip of its own; pinned, so that a figure can be made again.
        without: packages that the last one asks for and that text generation does not need.
    """

    name: str
    packages: tuple[str, ...]
    without: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return cache_dir() / "peers" / "environments" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def prepare(self) -> Path:
        """The interpreter, once everything is installed. Raises PeerError with pip's reason when that fails."""
        stamp = self.folder / "packages.txt"
        wanted = "\n".join([*self.packages, *(f"without {name}" for name in self.without)])
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
            print(f"Installing {', '.join(self.packages)} for the comparison, once ...", file=sys.stderr)
            shutil.rmtree(self.folder, ignore_errors=True)
            log = cache_dir() / "peers" / "logs" / f"{self.name}-install.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)
            self._run([sys.executable, "-m", "venv", str(self.folder)], log)
            self._install(log)
            stamp.write_text(wanted, encoding="utf-8")
        return self.python

    def _install(self, log: Path) -> None:
        for package in self.packages:
            if package == self.packages[-1] and self.without:
                self._pip(["--no-deps", package], log)
                self._pip(self._needs(package), log)
            else:
                self._pip([package], log)

    def _needs(self, package: str) -> list[str]:
        name = package.partition("==")[0]
        command = [str(self.python), "-c", _NEEDS, name, *self.without]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    def _pip(self, packages: Sequence[str], log: Path) -> None:
        index = os.environ.get("TORCH_INDEX_URL")
        extra = ["--extra-index-url", index] if index else []
        command = [str(self.python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        self._run([*command, *extra, *packages], log)

    def _run(self, command: Sequence[str], log: Path) -> None:
        with log.open("a", encoding="utf-8") as output:
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            reasons = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
            reason = (reasons or lines or ["no reason given"])[-1].rstrip(".")[:160]
            hint = "; TORCH_INDEX_URL may name an index that has it" if TORCH in command else ""
            raise PeerError(f"it cannot be installed ({reason}{hint})")
