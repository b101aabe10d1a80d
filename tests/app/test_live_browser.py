"""A running server watched in the page, and the page as a part of another application."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, expect

from app.mount import mount
from app.presets import PRESETS
from tests.app.axe import serious
from tests.app.browser import View, open_view
from tests.app.test_live import generating, server_to_watch
from tests.server.processes import eventually

pytestmark = pytest.mark.xdist_group("second-browser")


def watch(view: View, url: str) -> None:
    view.page.locator("#details button").first.click()
    view.write("#watch-url input, #watch-url textarea", url)
    view.page.locator("#watch").click()


def num_watch_threads() -> int:
    return sum(thread.name == "twinfer-watch" for thread in threading.enumerate())


def test_the_steps_of_a_server_arrive_while_it_runs_until_somebody_cancels(view: View) -> None:
    with server_to_watch() as server:
        watch(view, server.url)
        view.wait_for_status("connected; no step yet")
        with generating(server, max_tokens=120):
            view.page.wait_for_function(
                "() => document.querySelector('.tw h2')?.textContent.startsWith('Live: ')"
            )
            view.page.wait_for_function(  # it follows; both in one look, for they move
                "() => { const s = document.querySelector('.tw .scrub'); return +s.max > 0 && s.value === s.max; }"
            )
            before = view.last
            view.page.wait_for_function(
                "before => +document.querySelector('.tw .scrub').max > before", arg=before, timeout=20_000
            )
            view.find('[data-do="first"]').focus()
            view.page.keyboard.press("Enter")  # whoever looks back stays where he is, and keeps the focus
        view.page.wait_for_function("() => +document.querySelector('.tw .scrub').max >= 119", timeout=20_000)
        view.expect_step(0)
        expect(view.find('[data-do="first"]')).to_be_focused()
        expect(view.find(".whatifbtn")).to_be_disabled()
        expect(view.find(".name small")).to_have_text("reference · script · 1000 blocks of 4")
        view.page.keyboard.press("End")
        expect(view.find('[data-queue="finished"] h5 b')).to_have_text("2")
        view.page.locator("#cancel").click()
        view.wait_for_status("Cancelled. Shown are the 1")
        eventually(lambda: gc.collect() >= 0 and num_watch_threads() == 0, "the connection is closed", 20)


def test_a_page_that_is_closed_watches_no_longer(browser: Browser, address: str) -> None:
    with server_to_watch() as server:
        view = open_view(browser, address)
        watch(view, server.url)
        view.wait_for_status("connected; no step yet")
        eventually(lambda: num_watch_threads() == 1, "the connection is open")
        view.page.context.close()
        eventually(lambda: gc.collect() >= 0 and num_watch_threads() == 0, "the connection is closed", 20)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_violation_while_a_server_is_watched(
    browser: Browser, address: str, theme: str
) -> None:
    with server_to_watch() as server:
        view = open_view(browser, address, theme=theme)
        watch(view, server.url)
        view.wait_for_status("connected; no step yet")
        with generating(server, max_tokens=60):
            view.page.wait_for_function("() => +document.querySelector('.tw .scrub')?.max > 20")
            view.scrub(12)  # whoever looks back stays where he is, so the page stands still
            assert serious(view.page) == []
        assert view.complaints == []
        view.page.context.close()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://127.0.0.1:9", "Nobody answers at http://127.0.0.1:9; start one with"),
        ("not an address", "'not an address' is no address of a server"),
        ("http://192.0.2.1:8000", "192.0.2.1 is another machine"),
    ],
)
def test_a_server_that_cannot_be_watched_is_answered_with_a_sentence(
    view: View, url: str, sentence: str
) -> None:
    watch(view, url)
    view.wait_for_status(sentence)
    expect(view.page.locator("#status [role=alert]")).to_have_count(1)


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started, "the server has started")
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


def test_mounted_into_an_application_it_is_the_same_page(browser: Browser) -> None:
    app = FastAPI()

    @app.get("/health")
    def health() -> str:
        return "fine"

    mount(app, "/ui", watch_url="http://127.0.0.1:4321")
    with serving(app) as url:
        view = open_view(browser, f"{url}/ui")
        expect(view.find("h2")).to_have_text(PRESETS[0].title["en"])
        field = view.page.locator("#watch-url input, #watch-url textarea")
        view.page.locator("#details button").first.click()
        expect(field).to_have_value("http://127.0.0.1:4321")
        view.choose_preset(PRESETS[3].title["en"])
        assert view.page.evaluate("url => fetch(`${url}/health`).then(r => r.json())", url) == "fine"
        assert view.complaints == []
        view.page.context.close()
