"""One browser, and one server of the page, for all tests that look at it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from app.page import launch
from tests.app.browser import View, open_browser, open_view


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    blocks, address = launch(block=False)
    yield address
    blocks.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def view(browser: Browser, address: str) -> Iterator[View]:
    view = open_view(browser, address)
    yield view
    assert view.complaints == []
    view.page.context.close()
