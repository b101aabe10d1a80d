"""Every page of the site, in both languages, in a real browser: nothing is missing, nothing is asked of elsewhere, and
it fits on a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.app.browser import View
from tests.docs.conftest import later_on_the_site, on_the_site

PHONE = {"width": 390, "height": 844}
# Pictures below the fold are asked for now, and waited for.
BROKEN_IMAGES = """async () => {
  const images = [...document.images];
  for (const image of images) image.loading = "eager";
  await Promise.all(images.map((image) => image.decode().catch(() => {})));
  return images.filter((image) => !image.naturalWidth).map((image) => image.src);
}"""
# What reaches beyond the window and is not within something that scrolls by itself.
TOO_WIDE = """() => document.documentElement.scrollWidth <= innerWidth ? [] :
  [...document.body.querySelectorAll("*")].filter((node) => node.getBoundingClientRect().right > innerWidth + 1)
    .slice(0, 3).map((node) => node.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def phone(browser: Browser) -> Iterator[View]:
    context = browser.new_context(viewport=PHONE, reduced_motion="reduce")
    view = View(context.new_page())
    view.watch()
    yield view
    context.close()


def faults(view: View) -> list[str]:
    """What is wrong with the page that is open."""
    broken = [f"broken image {source}" for source in view.page.evaluate(BROKEN_IMAGES)]
    wide = [f"too wide for a phone: {start}" for start in view.page.evaluate(TOO_WIDE)]
    found = [*view.complaints, *broken, *wide]
    view.complaints.clear()
    return found


def shorten_search(view: View, site: Path) -> None:
    """Every page reads the index of the whole site; half of the time would go into that."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    index["docs"] = index["docs"][:1]
    view.page.route("**/search/search_index.json", lambda route: route.fulfill(json=index))


@pytest.mark.parametrize(
    "language", [pytest.param("en", marks=on_the_site), pytest.param("zh", marks=later_on_the_site)]
)
def test_every_page_loads_all_it_shows_from_here_and_fits_on_a_phone(
    language: str, site: Path, address: str, phone: View
) -> None:
    names = (page.relative_to(site).parent.as_posix() for page in site.glob("**/index.html"))
    pages = sorted(name for name in names if (name.split("/")[0] == "zh") == (language == "zh"))
    assert ("zh/scheduler" if language == "zh" else "scheduler") in pages
    wrong = {}
    for number, name in enumerate(pages):
        if number == 1:  # the first has read it whole
            shorten_search(phone, site)
        phone.page.goto(f"{address}/{name}/".replace("/./", "/"))
        if found := faults(phone):
            wrong[name] = found
    assert wrong == {}


@on_the_site
def test_a_page_with_faults_is_found_out(address: str, phone: View) -> None:
    phone.page.goto(f"{address}/glossary/")
    assert faults(phone) == []
    phone.page.evaluate(
        """() => {
          document.body.insertAdjacentHTML("beforeend",
            '<img src="/no-such-picture.png" alt="none"><div style="width: 900px">wide</div>');
          console.error("an error of the page");
          fetch("http://elsewhere.invalid/").catch(() => {});
        }"""
    )
    phone.page.wait_for_function("() => [...document.images].every((image) => image.complete)")
    found = "\n".join(faults(phone))
    for part in ("broken image", "too wide", "an error of the page", "request to http://elsewhere.invalid/"):
        assert part in found
