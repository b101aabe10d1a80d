"""What the API pages show beside what griffe reads: the comments behind fields, and links from one tier to the other.

The project describes a field by a comment behind it (`seq_lens: np.ndarray  # int32 [S]`); for griffe only a string
counts. A file or a name that a docstring mentions (`fast/scheduler.py`, `contracts.rope`) becomes a link to its entry.
"""

from __future__ import annotations

import functools
import io
import re
import tokenize
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("reference", "fast")
# In brackets with an address behind, as a link for readers of the source, or plain.
FILE = re.compile(r"\[?`((?:reference|fast)/[\w/]+)\.py`(?:\]\([^)\s]*\))?")
NAME = re.compile(r"`((?:reference|fast|contracts)(?:\.\w+)+)`(?!\])")


def modules() -> list[str]:
    """Every module of both tiers that has an entry: all but programs, which nobody imports."""
    names = []
    for tier in TIERS:
        for path in sorted((ROOT / tier).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] != "__main__" and "children" not in parts:
                names.append(".".join(part for part in parts if part != "__init__"))
    return names


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def twin(module: str) -> str | None:
    """The module of the same name in the other tier, if there is one."""
    tier, _, rest = module.partition(".")
    other = f"{'fast' if tier == 'reference' else 'reference'}{rest and '.' + rest}"
    return other if other in modules() else None


@functools.cache
def _entries(module: str) -> frozenset[str]:
    """The module, its classes and functions, and their methods, by full name."""
    found, owner = [module], module
    for line in file_of(module).read_text(encoding="utf-8").splitlines():
        if match := re.match(r"(    )?(class|def|async def) ([A-Za-z]\w*)", line):
            found.append(f"{owner if match[1] else module}.{match[3]}")
            if match[2] == "class" and not match[1]:
                owner = found[-1]
    return frozenset(found)


def _entry(name: str) -> str | None:
    """The full name under which `name` has an entry on the API pages."""
    full = f"reference.{name}" if name.startswith("contracts.") else name
    known = set(modules())
    parts = full.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if module in known:
            return full if full in _entries(module) else None
    return None


def linked(text: str) -> str:
    """A docstring with links to the entries of the files and names that it mentions; code in it is left alone."""

    def link_file(match: re.Match[str]) -> str:
        entry = _entry(match[1].replace("/", ".").removesuffix(".__init__"))
        return f"[`{match[1]}.py`][{entry}]" if entry else f"`{match[1]}.py`"

    def link_name(match: re.Match[str]) -> str:
        entry = _entry(match[1])
        return f"[{match[0]}][{entry}]" if entry else match[0]

    lines = []
    for line in text.splitlines():
        is_code = line.startswith("    ") and "`" not in line
        lines.append(line if is_code else NAME.sub(link_name, FILE.sub(link_file, line)))
    return "\n".join(lines)


@functools.cache
def _comments(path: Path) -> dict[int, str]:
    """Line number -> the comment at the end of that line."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    found = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    return {
        line: text.lstrip("# ") for line, text in found.items() if not re.match(r"# (type|noqa|fmt):?", text)
    }


class Docstrings(griffe.Extension):
    """Loaded by mkdocstrings, which reads the sources with griffe: see mkdocs.yml."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is not None or attr.lineno is None:
            return
        comments = _comments(Path(str(attr.filepath)))
        lines = range(attr.lineno, (attr.endlineno or attr.lineno) + 1)
        if words := " ".join(comments[line] for line in lines if line in comments):
            attr.docstring = griffe.Docstring(words, parent=attr, lineno=attr.lineno)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = linked(obj.docstring.value)

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        """Runs after `on_object`, and alone for a package. Fast files name their twins themselves."""
        if mod.parent is None:
            self.on_object(obj=mod)
        other = twin(mod.path)
        if other is not None and mod.docstring is not None and f"][{other}]" not in mod.docstring.value:
            path = file_of(other).relative_to(ROOT)
            mod.docstring.value += f"\n\nTwin: [`{path}`][{other}]."
