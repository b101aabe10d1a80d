"""What the page `sandbox.md` needs beside itself: Pyodide from npm, and the project's own Python files in an archive.

Neither is committed. Pyodide (CPython compiled to WebAssembly, MPL-2.0, https://pyodide.org) is fetched once into
build/npm and checked; where that cannot be done, the site is built all the same, and the page says what is missing.
This file is also a hook of mkdocs: after a build it copies both into the site.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from html import escape
from pathlib import Path
from typing import Any

from docs.support.sandbox import CHOICES, LIMITS, PRESETS, REQUEST_FIELDS

ROOT = Path(__file__).resolve().parents[2]
VERSION = "314.0.7"
SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"  # of npm's tarball
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
SOURCES = (
    "reference/*.py",
    "reference/contracts/*.py",
    "reference/frontend/*.py",
    "app/__init__.py",
    "app/sentences.py",
    "docs/support/__init__.py",
    "docs/support/pictures.py",
    "docs/support/runs.py",
    "docs/support/sandbox.py",
    "docs/support/source.py",
)
FETCH_SECONDS = 120


def pyodide() -> Path:
    """The folder with `FILES`; fetched if it is not there yet.

    Raises:
        RuntimeError: npm is missing, cannot fetch, or brought something else than what is pinned.
    """
    folder = ROOT / "build" / "npm" / f"pyodide-{VERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            complete = _unpack(_fetch(Path(scratch)), Path(scratch) / "complete")
            try:
                complete.rename(folder)
            except OSError:  # somebody else was quicker
                if not folder.is_dir():
                    raise
    return folder


def _fetch(scratch: Path) -> Path:
    """The package's tarball, as npm has it."""
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("npm is not installed (on Debian: sudo apt-get install -y npm)")
    command = [npm, "pack", "--silent", f"pyodide@{VERSION}"]
    try:
        subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=FETCH_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"npm could not fetch pyodide@{VERSION}") from error
    (tarball,) = scratch.glob("*.tgz")
    found = hashlib.sha256(tarball.read_bytes()).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"npm brought another pyodide@{VERSION} than the one that is pinned ({found})")
    return tarball


def _unpack(tarball: Path, folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(tarball) as archive:
        for name in FILES:
            content = archive.extractfile(f"package/{name}")
            assert content is not None, f"{name} is no file"
            (folder / name).write_bytes(content.read())
    return folder


def pack_sources(path: Path) -> None:
    """An archive of the files that the page's Python imports, as they are in the tree."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for pattern in SOURCES:
            found = sorted(ROOT.glob(pattern))
            if not found:
                raise FileNotFoundError(f"There is no {pattern} to put into the archive of the sandbox.")
            for file in found:
                archive.write(file, file.relative_to(ROOT).as_posix())


def panel() -> str:
    """The page's HTML: where the form and the run will stand, or why they cannot."""
    try:
        pyodide()
    except RuntimeError as error:
        return (
            '<div class="admonition warning" id="sandbox-missing"><p class="admonition-title">Not in this copy of the '
            f"site</p><p>Python for the browser could not be added when the site was built: {escape(str(error))}. "
            "Mend that and build the site again with <code>make docs</code>; until then <code>make app</code> shows "
            "the same on your machine.</p></div>"
        )
    form = {
        "presets": PRESETS, "limits": LIMITS, "choices": CHOICES, "fields": REQUEST_FIELDS,
    }  # fmt: skip
    # "</" would end the element in which the JSON stands.
    text = json.dumps(form, ensure_ascii=False).replace("</", "<\\/")
    return (
        '<div id="sandbox" class="tw-sandbox"><noscript>This page runs Python in your browser and needs JavaScript '
        f'for it.</noscript></div><script type="application/json" id="sandbox-form">{text}</script>'
        '<link rel="stylesheet" href="../assets/sandbox.css"><script src="../assets/sandbox.js"></script>'
    )


def on_post_build(config: Any) -> None:
    """Called by mkdocs once for every language, before it goes on to the next."""
    target = Path(config.site_dir) / "assets" / "sandbox"
    try:
        source = pyodide()
    except RuntimeError:
        return  # the page says so
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, target / name)
    pack_sources(target / "engine.zip")
