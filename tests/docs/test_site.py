"""The tutorial site builds without a warning, shows what is there, and loads nothing from elsewhere.

Python fences of the pages are tests of their own: `pytest --markdown-docs docs`, which `make test` runs with this
suite. Those with a session are marked `notest`; the build runs them, with all that stands before them on the page.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.support import run, source, steps_table
from docs.support.pictures import budget_bars, pool_picture, timeline
from tests.docs.conftest import on_the_site

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))


class _Resources(HTMLParser):
    """Everything a browser would fetch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.images_without_text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio") and values.get("src"):
            self.urls.append(values["src"] or "")
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.urls.append(values.get("href") or "")
        if tag == "img" and not values.get("alt"):
            self.images_without_text.append(values.get("src") or "")
        if tag == "svg" and values.get("role") == "img" and not values.get("aria-label"):
            self.images_without_text.append("svg")


@on_the_site
def test_no_page_loads_anything_from_elsewhere_and_every_picture_has_words(site: Path) -> None:
    pages = list(site.glob("**/*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        resources = _Resources()
        resources.feed(page.read_text(encoding="utf-8"))
        assert [url for url in resources.urls if re.match(r"(https?:)?//", url)] == [], page
        assert resources.images_without_text == [], page


@on_the_site
def test_no_block_of_a_page_failed_to_run(site: Path) -> None:
    for page in site.glob("**/*.html"):
        assert "Traceback (most recent call last)" not in page.read_text(encoding="utf-8"), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:reference|fast|csrc|tests|docs|tools)/[\w./-]*)`", text))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    from reference.frontend.cli import _COMMANDS

    known = {command.name for command in _COMMANDS}
    named = set(re.findall(r"twinfer ([a-z]+)", page.read_text(encoding="utf-8")))
    assert named <= known


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_to_elsewhere_are_whole_and_encrypted(page: Path) -> None:
    """Nothing is fetched here: whether a page is still there, somebody has to look."""
    targets = re.findall(r"\]\((https?:[^)]*)\)", page.read_text(encoding="utf-8"))
    form = re.compile(r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/[\w.~/-]*)?(#[\w.-]+)?")
    assert [target for target in targets if not form.fullmatch(target)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fences_have_heads_that_the_site_understands(page: Path) -> None:
    """A fence with a word behind its language that is no option swallows all that follows; `py3` is not tested."""
    heads = re.findall(r"^```(\w+ .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert [head for head in heads if "=" not in head] == []


def test_code_on_a_page_is_cut_out_by_name_and_a_missing_name_is_an_error() -> None:
    shown = source("reference/scheduler.py", "Scheduler.schedule")
    assert "def schedule(self)" in shown
    assert "_schedule_waiting(plan)" in shown
    with pytest.raises(LookupError, match=r"reference/scheduler\.py has no Scheduler\.plan"):
        source("reference/scheduler.py", "Scheduler.plan")


def test_pictures_show_the_trace() -> None:
    traces = run(("a", 7, 3), ("b", 10, 2), blocks=8)
    picture = pool_picture(traces[0])
    assert picture.count("<rect") == 8
    assert "block 1: a, findable in the prefix cache" in picture
    assert "block 6: free, place 1 in the queue" in picture
    assert timeline(traces).count("<rect") == 3 + 2
    assert budget_bars(traces).count("<title>") == 3 + 2
    assert "| 0 | 7 | 10 | 17 | 3 |" in steps_table(traces)


@pytest.mark.parametrize("tier", ["reference", "fast"])
def test_scripted_runs_are_the_same_on_both_tiers(tier: str) -> None:
    def schedule(name: str) -> list[dict[str, int]]:
        return [
            trace.num_scheduled_tokens
            for trace in run(("a", 9, 7), ("b", 6, 5, 0, 0, 3), blocks=9, budget=16, tier=name, drafts=3)
        ]

    assert schedule(tier) == schedule("reference")
