"""What the page `sandbox.md` needs beside itself: Pyodide, and the project's own Python files in an archive.

Neither is committed. Pyodide (CPython compiled to WebAssembly, https://pyodide.org) comes from npm with
`tools/web_packages.py`; where it is missing the site is built all the same, and the page says so. This file is also a
hook of mkdocs: after a build it puts the archive into the site.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from docs.support import web
from docs.support.sandbox import CHOICES, LIMITS, PRESETS, REQUEST_FIELDS

ROOT = Path(__file__).resolve().parents[2]
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
    if not web.is_there("pyodide"):
        return (
            '<div class="admonition warning" id="sandbox-missing"><p class="admonition-title">Not in this copy of the '
            "site</p><p>Python for the browser was not there when the site was built. Fetch it with <code>make docs"
            "</code> or <code>tools/setup.sh web</code>, which need npm, and build again; until then "
            "<code>make app</code> shows the same on your machine.</p></div>"
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
    """Called by mkdocs for every language; Pyodide is copied with the other packages (docs/support/web.py)."""
    target = Path(config.site_dir) / "assets" / "sandbox"
    target.mkdir(parents=True, exist_ok=True)
    pack_sources(target / "engine.zip")
