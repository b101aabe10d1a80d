"""The API pages: every module of both tiers has its entry, with the words that stand in the source."""

from __future__ import annotations

import re
from pathlib import Path

import griffe
import pytest

from docs.support.docstrings import Docstrings, linked, modules, twin
from tests.docs.conftest import ROOT, on_the_site

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))


def entries(page: Path) -> list[str]:
    return re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def loaded(module: str) -> griffe.Module:
    package = griffe.load(
        module.split(".")[0], search_paths=[ROOT], extensions=griffe.load_extensions(Docstrings)
    )
    found = package[module.partition(".")[2]]
    assert isinstance(found, griffe.Module)
    return found


def test_every_module_of_both_tiers_stands_on_one_page() -> None:
    assert sorted(name for page in PAGES for name in entries(page)) == sorted(modules())


def test_modules_are_all_files_but_programs() -> None:
    files = [path for tier in ("reference", "fast") for path in (ROOT / tier).rglob("*.py")]
    programs = [path for path in files if path.name == "__main__.py" or path.parent.name == "children"]
    assert len(modules()) == len(files) - len(programs)


def test_the_comment_behind_a_field_is_its_description() -> None:
    fields = loaded("reference.attention")["AttentionMetadata"].members
    assert fields["query_start_loc"].docstring.value == "int32 [S + 1], starts with 0, ends with T"
    window = loaded("reference.contracts.config")["ModelConfig"].members["sliding_window"]
    assert window.docstring.value.startswith("a token sees itself")  # behind a line of its own


def test_twins_name_each_other() -> None:
    assert twin("reference.models.llama") == "fast.models.llama"
    assert twin("fast") == "reference"
    assert twin("reference.frontend.llm") is None
    for module in ("reference.sampler", "fast.sampler", "fast.scheduler"):
        other = twin(module)
        assert f"][{other}]" in loaded(module).docstring.value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Twin of `reference/plan.py`.", "Twin of [`reference/plan.py`][reference.plan]."),
        ("[`reference/plan.py`](../reference/plan.py)", "[`reference/plan.py`][reference.plan]"),
        ("`reference/models/__init__.py`", "[`reference/models/__init__.py`][reference.models]"),
        ("see `contracts.rope`", "see [`contracts.rope`][reference.contracts.rope]"),
        ("`fast.llm.LLM`", "[`fast.llm.LLM`][fast.llm.LLM]"),
        ("`reference.plan.Nothing`, `fast/none.py`", "`reference.plan.Nothing`, `fast/none.py`"),
        ("    x = reference.plan.Plan", "    x = reference.plan.Plan"),
    ],
)
def test_what_a_docstring_names_becomes_a_link_if_it_is_there(text: str, shown: str) -> None:
    assert linked(text) == shown


@on_the_site
@pytest.mark.parametrize("language", ["", "zh"])
def test_every_entry_is_on_the_site_and_links_to_its_twin(site: Path, language: str) -> None:
    for page in PAGES:
        folder = "" if page.stem == "index" else page.stem
        html = (site / language / "api" / folder / "index.html").read_text(encoding="utf-8")
        for module in entries(page):
            assert f'id="{module}"' in html, module
            other = twin(module)
            assert other is None or re.search(rf'href="[^"]*#{re.escape(other)}"', html), module
        assert "][reference" not in html
        assert "][fast" not in html


@on_the_site
def test_a_signature_on_the_site_has_types_that_are_links(site: Path) -> None:
    html = (site / "api" / "scheduler" / "index.html").read_text(encoding="utf-8")
    assert 'href="../contracts/#reference.contracts.config.EngineConfig"' in html
    assert "fcfs" in (site / "api" / "contracts" / "index.html").read_text(encoding="utf-8")
