"""Fetch what the tutorial's pages run in the reader's browser, by npm, into .venv/npm: `python tools/web_packages.py`.

Only the files that a page loads are kept. Each package is pinned by version and by the digest of its archive, and its
dependencies are not fetched: these files are complete in themselves. The site's build copies the folder
(docs/support/web.py); nothing of it is committed.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv" / "npm"


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha512: str  # of the archive, in base64, as npm's lock files write it
    files: tuple[str, ...]  # as the archive names them; `*` stands for anything


PACKAGES = (
    Package(
        "mermaid",
        "11.17.2",
        "V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg==",
        ("LICENSE", "dist/mermaid.min.js"),
    ),
    Package(
        "katex",
        "0.19.1",
        "jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        ("LICENSE", "dist/katex.min.js", "dist/katex.min.css", "dist/fonts/*.woff2"),
    ),
    Package(  # CPython for the browser (MPL-2.0): its core, and no Python package
        "pyodide",
        "314.0.7",
        "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A==",
        ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"),
    ),
)


class FetchError(Exception):
    """One sentence for the user."""


def archive(package: Package, folder: Path) -> Path:
    """Download a package's archive into `folder` and check its digest."""
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError("npm is not installed.")
    wanted = f"{package.name}@{package.version}"
    result = subprocess.run(
        [npm, "pack", "--silent", wanted], cwd=folder, capture_output=True, text=True, check=False
    )
    if result.returncode:
        why = (result.stderr.strip() or "it says nothing").splitlines()[-1]
        raise FetchError(f"npm could not fetch {wanted}: {why}")
    path = folder / f"{package.name}-{package.version}.tgz"
    digest = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    if digest != package.sha512:
        raise FetchError(f"{wanted} is not the archive it was: its SHA-512 is {digest}.")
    return path


def keep(package: Package, path: Path, target: Path) -> None:
    """Unpack the files that a page loads, below `target`, without the folder `dist`."""
    found = set()
    with tarfile.open(path) as packed:
        for member in packed.getmembers():
            name = Path(member.name).relative_to("package")
            pattern = next((p for p in package.files if fnmatch.fnmatchcase(name.as_posix(), p)), None)
            source = packed.extractfile(member) if pattern and member.isfile() else None
            if pattern is None or source is None or ".." in name.parts:
                continue
            found.add(pattern)
            destination = target / package.name / Path(*[part for part in name.parts if part != "dist"])
            destination.parent.mkdir(parents=True, exist_ok=True)
            destination.write_bytes(source.read())
    if missing := set(package.files) - found:
        raise FetchError(f"{package.name} {package.version} has no {', '.join(sorted(missing))}.")


def main() -> int:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
        unpacked = Path(folder) / "npm"
        try:
            for package in PACKAGES:
                keep(package, archive(package, Path(folder)), unpacked)
        except FetchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        shutil.rmtree(FOLDER, ignore_errors=True)
        unpacked.rename(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
