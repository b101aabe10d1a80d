"""Diagrams and formulas: fetched once, loaded where they are needed, drawn without a word from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import Browser

from docs.support import web
from tests.docs.conftest import ROOT, later_on_the_site
from tools import web_packages

PAGES = sorted((ROOT / "docs").rglob("*.md"))
DIAGRAMS = {
    f"{page.name}-{number}": text
    for page in PAGES
    for number, text in enumerate(
        re.findall(r"^```mermaid\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
}


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_says_in_words_what_it_shows(name: str) -> None:
    title, words = (
        re.search(rf"^ *{key}: (.+)$", DIAGRAMS[name], re.MULTILINE) for key in ("accTitle", "accDescr")
    )
    assert title
    assert words
    assert len(words[1]) > 50


def test_only_pages_with_diagrams_or_formulas_load_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "PACKAGES", tmp_path)
    for package in ("mermaid", "katex"):
        (tmp_path / package).mkdir()
    assert web.with_scripts("<p>$5</p>", "page/") == "<p>$5</p>"
    diagram = web.with_scripts(f"{web.DIAGRAM}<code>a</code></pre>", "page/")
    assert re.findall(r'src="([^"]*)"', diagram) == [
        "../assets/npm/mermaid/mermaid.min.js",
        "../assets/diagrams.js",
    ]
    formula = web.with_scripts(f"<span {web.FORMULA}>x</span>", "zh/page/")
    assert re.findall(r'(?:src|href)="([^"]*)"', formula) == [
        "../../assets/npm/katex/katex.min.css",
        "../../assets/npm/katex/katex.min.js",
        "../../assets/formulas.js",
    ]


def test_without_the_packages_no_diagram_reaches_the_theme_that_would_fetch_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "PACKAGES", tmp_path / "none")
    html = web.with_scripts(f"{web.DIAGRAM}<code>a</code></pre><span {web.FORMULA}>x</span>", "page/")
    assert 'class="mermaid"' not in html
    assert "<script" not in html
    assert "<code>a</code>" in html
    web.copy(tmp_path / "site")
    assert not (tmp_path / "site").exists()


def _archive(names: list[str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    return packed.getvalue()


@pytest.fixture
def npm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An npm that hands out `content`, or fails with `error`."""
    served = SimpleNamespace(content=b"", error="")

    def run(command: list[str], cwd: Path, **_: Any) -> SimpleNamespace:
        if served.error:
            return SimpleNamespace(returncode=1, stderr=served.error)
        name, version = command[-1].split("@")
        (cwd / f"{name}-{version}.tgz").write_bytes(served.content)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(web_packages.shutil, "which", lambda _: "/usr/bin/npm")
    return served


def test_of_a_package_only_what_pages_load_is_kept(tmp_path: Path, npm: SimpleNamespace) -> None:
    npm.content = _archive(
        ["LICENSE", "dist/a.js", "dist/fonts/b.woff2", "dist/c.map", "node/LICENSE", "x/../../e.js"]
    )
    digest = base64.b64encode(hashlib.sha512(npm.content).digest()).decode()
    package = web_packages.Package("a", "1.0", digest, ("LICENSE", "dist/a.js", "dist/fonts/*.woff2"))
    web_packages.keep(package, web_packages.archive(package, tmp_path), tmp_path / "to")
    kept = sorted(path.relative_to(tmp_path / "to").as_posix() for path in (tmp_path / "to").rglob("*.*"))
    assert kept == ["a/a.js", "a/fonts/b.woff2"]
    assert (tmp_path / "to" / "a" / "LICENSE").read_text() == "LICENSE"
    lacking = web_packages.Package("a", "1.0", digest, ("dist/none.js",))
    with pytest.raises(web_packages.FetchError, match=r"a 1\.0 has no dist/none\.js"):
        web_packages.keep(lacking, tmp_path / "a-1.0.tgz", tmp_path / "to")


def test_an_archive_that_is_not_the_pinned_one_is_refused(tmp_path: Path, npm: SimpleNamespace) -> None:
    npm.content = b"something else"
    with pytest.raises(web_packages.FetchError, match="is not the archive it was"):
        web_packages.archive(web_packages.PACKAGES[0], tmp_path)


def test_what_npm_says_is_passed_on(
    tmp_path: Path, npm: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    npm.error = "npm error code ENOTFOUND\nnpm error network"
    assert web_packages.main() == 1
    assert capsys.readouterr().err == "error: npm could not fetch mermaid@11.17.2: npm error network\n"


@later_on_the_site
def test_diagrams_and_formulas_are_drawn_and_nothing_is_asked_of_another_machine(
    site: Path, address: str, browser: Browser
) -> None:
    texts = {
        path.parent.relative_to(site).as_posix(): path.read_text(encoding="utf-8")
        for path in site.rglob("index.html")
    }
    drawn = {name: html for name, html in texts.items() if web.DIAGRAM in html or web.FORMULA in html}
    assert {"scheduler", "zh/scheduler", "zh/life-of-a-request", "sampling", "notation", "api"} <= set(drawn)
    context = browser.new_context()
    page = context.new_page()
    elsewhere: list[str] = []
    page.on(
        "request", lambda request: elsewhere.extend([request.url] * (not request.url.startswith(address)))
    )
    page.on("pageerror", lambda error: elsewhere.append(str(error)))
    for name, html in drawn.items():
        page.goto(f"{address}/{name}/")
        diagrams = page.locator("div.mermaid")
        for number in range(html.count(web.DIAGRAM)):
            diagrams.nth(number).wait_for(timeout=20_000)
            box = diagrams.nth(number).bounding_box()
            assert box is not None, name
            assert box["height"] > 60, name
        assert page.locator("pre.mermaid").count() == 0, name
        assert page.locator(".arithmatex .katex").count() == html.count(web.FORMULA), name
        assert page.locator(".katex-error").count() == 0, name
    context.close()
    assert elsewhere == []
