"""Chinese pages: those that must exist do, none is older than its original, and the others say they are English."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.support import translations

PAGES = (
    "index",
    "quickstart",
    "life-of-a-request",
    "scheduler",
    "kv-cache",
    "paged-attention",
    "prefix-caching",
    "preemption",
    "paged-attention-ladder",
)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_translated(name: str) -> None:
    text = translations.translation(translations.DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 200


def test_no_translation_is_older_than_its_original() -> None:
    assert translations.stale() == []


@pytest.mark.parametrize("name", PAGES)
def test_a_translation_shows_the_same_code_and_links_to_the_same_pages(name: str) -> None:
    page = translations.DOCS / f"{name}.md"
    original, translated = (
        path.read_text(encoding="utf-8") for path in (page, translations.translation(page))
    )
    for pattern in (r"source\((\"[^)]*)\)", r"\]\(([\w-]+\.md)\)", r"^```bash\n(.*?)```"):
        wanted = set(re.findall(pattern, original, re.MULTILINE))
        assert wanted <= set(re.findall(pattern, translated, re.MULTILINE)), pattern


def test_a_changed_original_makes_its_translation_stale_until_it_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translations, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text("# Page\n")
    (tmp_path / "other.md").write_text("# Other\n")
    (tmp_path / "page.zh.md").write_text("# 页\n")
    assert translations.stale() == ["page"]
    translations.mark("page")
    assert translations.stale() == []
    (tmp_path / "page.md").write_text("# Page, changed\n")
    assert translations.stale() == ["page"]
    translations.mark("page")
    assert translations.stale() == []
    assert (tmp_path / "page.zh.md").read_text().count("translated_from") == 1
    assert [page.stem for page in translations.untranslated()] == ["other"]


class _Loader(yaml.SafeLoader):
    """mkdocs.yml names a function of an extension."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)


def _named(nav: list[Any]) -> list[str]:
    """Titles that the navigation itself gives, of sections and of pages."""
    names = []
    for item in nav:
        if isinstance(item, dict):
            for name, inside in item.items():
                names += [name, *_named(inside if isinstance(inside, list) else [])]
    return names


def test_every_title_in_the_navigation_has_a_chinese_one() -> None:
    config = yaml.load((translations.DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    (i18n,) = (
        plugin["i18n"] for plugin in config["plugins"] if isinstance(plugin, dict) and "i18n" in plugin
    )
    known = set(i18n["languages"][1]["nav_translations"])
    titles = {
        re.search(r"^# (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[1]  # type: ignore[index]
        for page in translations.untranslated()
    }
    assert titles <= known
    assert set(_named(config["nav"])) <= known
