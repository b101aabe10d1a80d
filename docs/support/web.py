"""Mermaid and KaTeX: copied into the site from .venv/npm (tools/web_packages.py), loaded by the pages that need them.

Material fetches Mermaid from elsewhere when a page has a diagram and no `mermaid` is there yet. So a page with a
diagram loads ours first, and without ours no diagram reaches the browser: its source is shown instead.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from mkdocs.utils import get_relative_url

PACKAGES = Path(__file__).resolve().parents[2] / ".venv" / "npm"
FOLDER = "assets/npm"
DIAGRAM = '<pre class="mermaid">'
FORMULA = 'class="arithmatex"'


def is_there(package: str) -> bool:
    return (PACKAGES / package).is_dir()


def with_scripts(html: str, url: str) -> str:
    """The content of a page at `url`, with what its diagrams and formulas need."""

    def address(path: str) -> str:
        return get_relative_url(path, url)

    if DIAGRAM in html:
        if is_there("mermaid"):
            html = re.sub(
                f"{DIAGRAM}.*?</pre>",
                r'<div class="tw-diagram" tabindex="0">\g<0></div>',
                html,
                flags=re.DOTALL,
            )
            html += (
                f'\n<script src="{address(f"{FOLDER}/mermaid/mermaid.min.js")}"></script>'
                f'\n<script src="{address("assets/diagrams.js")}"></script>'
            )
        else:
            html = html.replace(DIAGRAM, '<pre class="tw-source">')
    if FORMULA in html and is_there("katex"):
        katex = f"{FOLDER}/katex/katex.min"
        html += (
            f'\n<link rel="stylesheet" href="{address(f"{katex}.css")}">'
            f'\n<script src="{address(f"{katex}.js")}"></script>'
            f'\n<script src="{address("assets/formulas.js")}"></script>'
        )
    return html


def copy(site: Path) -> None:
    if PACKAGES.is_dir():
        shutil.copytree(PACKAGES, site / FOLDER, dirs_exist_ok=True)
