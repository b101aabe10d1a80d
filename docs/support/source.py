"""Code on a page: a function or class, cut out of its file by name."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def source(path: str, name: str | None = None, docstring: bool = True) -> str:
    """A fenced block with the source of `name` (`Class.method`, or a top-level name) in the file at `path`.

    Raises:
        LookupError: the file has no such name, so the page is out of date.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    if name is None:
        first, last, body = 1, len(lines), text
    else:
        node = _find(ast.parse(text), name, path)
        first, last = _first_line(node), node.end_lineno or node.lineno
        kept = list(range(first, last + 1))
        if not docstring:
            hidden = _docstring_lines(node)
            kept = [number for number in kept if number not in hidden]
        body = textwrap.dedent("\n".join(lines[number - 1] for number in kept))
    title = f"{path}" if name is None else f"{path}, {name} (lines {first} to {last})"
    return f'```python title="{title}"\n{body.rstrip()}\n```\n'


Definition = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef


def _find(tree: ast.Module, name: str, path: str) -> Definition:
    body: list[ast.stmt] = tree.body
    found: Definition | None = None
    for part in name.split("."):
        found = next((node for node in body if isinstance(node, Definition) and node.name == part), None)
        if found is None:
            raise LookupError(f"{path} has no {name}; mend the page that shows it")
        body = found.body
    assert found is not None
    return found


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _docstring_lines(node: Definition) -> set[int]:
    first = node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return set()
