"""A real browser on a real page. Everything the page logs as an error, or asks of another machine, fails the test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

WAIT_MS = 20_000
expect.set_options(timeout=WAIT_MS)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def browser_path() -> str:
    """Where the browser is. Raises RuntimeError when there is none."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    raise RuntimeError("The tests of the app need a browser: sudo apt-get install -y chromium fonts-noto-cjk")


@contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # A container lets no process make the sandbox that Chromium wants; the page is our own.
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class View:
    """The viewer in a page."""

    page: Page
    complaints: list[str] = field(default_factory=list)  # console errors and requests that leave this machine

    def watch(self) -> None:
        def on_request(request: Any) -> None:
            parts = urlsplit(request.url)
            if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname != "127.0.0.1":
                self.complaints.append(f"request to {request.url}")

        def on_console(message: Any) -> None:
            if message.type == "error":
                self.complaints.append(message.text)

        self.page.on("request", on_request)
        self.page.on("console", on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def find(self, selector: str, has_text: str | None = None) -> Locator:
        return self.page.locator(f".tw {selector}", has_text=has_text)

    @property
    def step(self) -> int:
        return int(self.page.locator(".tw").get_attribute("data-step") or -1)

    @property
    def last(self) -> int:
        return int(self.find(".scrub").get_attribute("max") or -1)

    def scrub(self, step: int) -> None:
        self.find(".scrub").fill(str(step))

    def expect_step(self, step: int) -> None:
        expect(self.page.locator(".tw")).to_have_attribute("data-step", str(step))

    def fact(self, key: str) -> Locator:
        """The figure of each run."""
        return self.find(f'.fact[data-fact="{key}"] dd span:not(.to)')

    def write(self, field: str, text: str) -> None:
        """Into a field of the form. Gradio may set one that has just been opened to its first value once more."""
        node = self.page.locator(field)
        for _ in range(3):
            node.fill(text)
            self.page.wait_for_timeout(250)
            if node.input_value() == text:
                return
        raise AssertionError(f"{field} does not keep {text!r}")

    def wait_for_status(self, text: str) -> None:
        self.page.wait_for_function(
            "text => document.querySelector('#status')?.textContent.includes(text)", arg=text, timeout=WAIT_MS
        )

    def wait_for_title(self, start: str) -> None:
        """Until runs so called are drawn whole: the status says "Done" before the viewer takes the last page."""
        self.page.wait_for_function(
            """start => document.querySelector('.tw h2')?.textContent.startsWith(start)
              && document.querySelector('.tw').dataset.done === 'true'""",
            arg=start,
            timeout=WAIT_MS,
        )

    def choose_preset(self, title: str) -> None:
        self.choose("preset", title)
        self.wait_for_title(title)
        self.wait_for_status("Done")

    def choose(self, dropdown: str, text: str) -> None:
        self.page.locator(f"#{dropdown} input").click()
        self.page.locator("[role=option]", has_text=text).first.click()


def open_view(
    browser: Browser,
    address: str,
    *,
    width: int = 1440,
    height: int = 900,
    theme: str = "light",
    **options: Any,
) -> View:
    """A fresh page; motion is reduced unless asked for, so that it stands still."""
    options = {"locale": "en-US", "reduced_motion": "reduce", **options}
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    view = View(context.new_page())
    view.watch()
    go_to(view.page, address, theme)
    return view


def go_to(page: Page, address: str, theme: str = "light") -> None:
    page.goto(f"{address.rstrip('/')}/?__theme={theme}")
    page.wait_for_selector(".tw .pane", timeout=60_000)
