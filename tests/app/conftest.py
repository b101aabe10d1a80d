"""One browser, and one server of the page, for all tests of a worker that look at it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from app.page import launch
from tests.app.browser import View, go_to, open_browser, open_view


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    blocks, address = launch(block=False)
    yield address
    blocks.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def tab(browser: Browser, address: str) -> Iterator[View]:
    """One tab of the browser, with the scripts of the page in its cache."""
    view = open_view(browser, address)
    yield view
    view.page.context.close()


@pytest.fixture
def view(tab: View, address: str) -> Iterator[View]:
    """The page as it is when it has just been opened: a new document, and a new session of the server."""
    tab.page.mouse.move(0, 0)
    go_to(tab.page, address)
    yield tab
    complaints = list(tab.complaints)
    tab.page.goto(
        "about:blank"
    )  # what this test started ends here; gradio complains that its streams are cut off
    tab.complaints.clear()
    assert complaints == []
