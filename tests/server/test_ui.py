"""`twinfer serve --app`: the visualiser at /ui, on this machine and for those who have a key."""

from __future__ import annotations

import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from app.presets import PRESETS
from reference.frontend.server.args import ServerArgs
from reference.frontend.server.errors import APIError
from reference.frontend.server.ui import check_visitor
from tests.app.browser import open_browser, open_view
from tests.server.processes import ServerProcess, eventually, running

pytestmark = pytest.mark.xdist_group("ui")  # one server and one browser

LOGIN = ("anybody", "secret")


@pytest.fixture(scope="module")
def with_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    from tests.tiny_models import make_tiny_llama

    model = make_tiny_llama(tmp_path_factory.mktemp("ui"))
    options = ("--app", "--api-key", "other", "--api-key", "secret", "--served-model-name", "tiny")
    with running(model, "reference", *options) as server:
        yield server


def basic(name: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + b64encode(f"{name}:{password}".encode()).decode()}


def test_the_page_works_in_a_browser_that_has_asked_for_the_key(with_app: ServerProcess) -> None:
    eventually(lambda: f"The app is at {with_app.url}/ui" in with_app.log, "the address is told")
    with open_browser() as browser:
        credentials = {"username": LOGIN[0], "password": LOGIN[1]}
        view = open_view(browser, f"{with_app.url}/ui/", http_credentials=credentials)
        view.choose_preset(PRESETS[2].title["en"])
        assert view.last > 3
        assert view.complaints == []


def test_whoever_has_no_key_sees_nothing_of_the_page(with_app: ServerProcess) -> None:
    for path in ("/ui", "/ui/", "/ui/config", "/ui/gradio_api/info", "/ui/theme.css"):
        for headers in ({}, basic("anybody", "wrong"), basic("secret", ""), {"Authorization": "Basic =="}):
            answer = with_app.get(path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"].startswith("Basic realm=")
    assert with_app.send("POST", "/ui/gradio_api/queue/join", json={}).status_code == 401
    for headers in (basic(*LOGIN), {"Authorization": "Bearer other"}):
        assert with_app.get("/ui/", headers=headers).status_code == 200
    # The password of the page opens nothing else: a browser would send it along for any other page.
    assert with_app.get("/v1/models", headers=basic(*LOGIN)).status_code == 401


@pytest.mark.parametrize(
    ("host", "origin", "is_let_in"),
    [
        ("127.0.0.1:8000", "", True),
        ("localhost:8000", "http://localhost:8000", True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("[::1]", "", True),
        ("LOCALHOST", "", True),
        ("rebound.example:8000", "", False),
        ("127.0.0.1.example", "", False),
        ("", "", False),
        ("localhost:8000", "http://localhost:9000", False),
        ("localhost:8000", "http://evil.example", False),
        ("localhost:8000", "null", False),
    ],
)
def test_other_pages_and_other_names_of_this_machine_are_turned_away(
    host: str, origin: str, is_let_in: bool
) -> None:
    with nullcontext() if is_let_in else pytest.raises(APIError, match="this machine only|Another web page"):
        check_visitor(host, origin)


def test_a_page_of_elsewhere_is_turned_away_by_the_server(with_app: ServerProcess) -> None:
    headers = basic(*LOGIN)
    assert with_app.get("/ui/", headers=headers | {"Origin": "http://evil.example"}).status_code == 403
    assert with_app.get("/ui/", headers=headers | {"Host": "rebound.example"}).status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org"])
def test_the_app_is_refused_where_other_machines_would_see_it(host: str) -> None:
    with pytest.raises(ValueError, match="this machine only"):
        ServerArgs(host=host, app=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_the_app_may_be_shown_on_loopback(host: str) -> None:
    assert ServerArgs(host=host, app=True).app


def test_an_open_page_does_not_keep_the_server_from_stopping(model: Path) -> None:
    with running(model, "reference", "--app") as server, open_browser() as browser:
        open_view(browser, f"{server.url}/ui/")
        started = time.monotonic()
        assert server.stop(20) == 0
        assert time.monotonic() - started < 15  # of the 30 s that unfinished requests would get
        assert "Traceback" not in server.log


def test_without_gradio_a_sentence_says_what_to_install(model: Path) -> None:
    code = """
import sys
sys.modules["gradio"] = None
from reference.frontend.cli import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "serve", "--app", "--port", "0", "--model", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "twinfer[app]" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_page_is_not_there_unless_asked_for(server: ServerProcess) -> None:
    assert server.get("/ui").status_code == 404
