"""Which pages are translated, and whether their original has changed since.

A translation NAME.zh.md carries in its head the digest of the NAME.md it was made from:

    python -m docs.support.translations            list what is missing or older than its original
    python -m docs.support.translations scheduler  the translation of scheduler.md is up to date again
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^translated_from: (\w+)$", re.MULTILINE)


def digest(page: Path) -> str:
    return hashlib.sha256(page.read_bytes()).hexdigest()[:16]


def originals() -> list[Path]:
    return sorted(page for page in DOCS.glob("*.md") if not page.name.endswith(".zh.md"))


def translation(page: Path) -> Path:
    return page.with_suffix(".zh.md")


def untranslated() -> list[Path]:
    return [page for page in originals() if not translation(page).exists()]


def stale() -> list[str]:
    """Names of pages whose translation was made from another text than today's."""
    names = []
    for page in originals():
        if translation(page).exists():
            found = MARK.search(translation(page).read_text(encoding="utf-8"))
            if found is None or found[1] != digest(page):
                names.append(page.stem)
    return names


def mark(name: str) -> None:
    """Write the digest of today's original into the translation's head."""
    page = DOCS / f"{name}.md"
    path = translation(page)
    text = path.read_text(encoding="utf-8")
    line = f"translated_from: {digest(page)}"
    if MARK.search(text):
        text = MARK.sub(line, text, count=1)
    elif text.startswith("---\n"):
        text = text.replace("---\n", f"---\n{line}\n", 1)
    else:
        text = f"---\n{line}\n---\n\n{text}"
    path.write_text(text, encoding="utf-8")


def main(names: list[str]) -> None:
    for name in names:
        mark(name)
    print("older than their original:", ", ".join(stale()) or "none")
    print("not translated:", ", ".join(page.stem for page in untranslated()) or "none")


if __name__ == "__main__":
    main(sys.argv[1:])
