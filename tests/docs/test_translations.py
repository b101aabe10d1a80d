"""Chinese pages: those that must exist do, none is older than its original, and the others say they are English."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
