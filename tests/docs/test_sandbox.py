"""The page that runs the scheduler in the reader's browser decides as the engine does, and needs only Python for it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from docs.support import sandbox_build, web
from docs.support.runs import run
from docs.support.sandbox import PRESETS, Desk, arrivals, options, start
from reference.contracts.trace import StepTrace
from tests.app.axe import serious
from tests.app.browser import View
from tests.docs.conftest import on_the_site

PYTHON_STARTS_MS = 120_000  # on two busy cores

Shown = tuple[dict[str, int], dict[str, list[int]], str]  # tokens of each request, block tables, the sentence


def expected(key: str) -> list[Shown]:
    """Schedule and block tables of each step, from the fast tier: it shares neither file with what the page runs."""
    settings = PRESETS[key]["settings"]
    traces = run(*arrivals(settings), tier="fast", **options(settings))
    says = [start(settings).step(number)["say"] for number in range(len(traces))]
    return [(*_decided(trace), say) for trace, say in zip(traces, says, strict=True)]


def _decided(trace: StepTrace) -> tuple[dict[str, int], dict[str, list[int]]]:
    tables = {name: list(table) for name, table in trace.state.cache.block_tables.items()}
    return {name: trace.num_scheduled_tokens.get(name, 0) for name in tables}, tables


def test_the_page_s_python_imports_only_what_is_in_its_archive_and_in_the_standard_library(
    tmp_path: Path,
) -> None:
    sandbox_build.pack_sources(tmp_path / "engine.zip")
    with zipfile.ZipFile(tmp_path / "engine.zip") as archive:
        archive.extractall(tmp_path / "engine")
    program = """
import json, sys
sys.path.insert(0, sys.argv[1])
from docs.support.sandbox import PRESETS, Desk
desk = Desk()
print(json.dumps([json.loads(desk.play(json.dumps(p["settings"])))["num_steps"] for p in PRESETS.values()]))
print(*sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
"""
    # Isolated and without site: neither this environment's packages nor the tree itself can be found.
    command = [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "engine")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    steps, foreign = result.stdout.splitlines()
    assert json.loads(steps) == [len(expected(key)) for key in PRESETS]
    assert foreign.split() == ["__main__", "app", "docs", "reference"]


@pytest.mark.parametrize("key", PRESETS)
def test_a_preset_shows_what_its_sentence_promises(key: str) -> None:
    totals = start(PRESETS[key]["settings"]).overview()["totals"]
    shown = {
        "mixed": totals["steps"] == 8,
        "preemption": totals["preemptions"] == 1 and totals["blocks swapped out"] == 0,
        "swap": totals["preemptions"] == 1 and totals["blocks swapped out"] == 3,
        "prefix": totals["tokens found in the cache"] == 3 * 12,
        "copy": totals["copies on write"] == 2,
        "priority": totals["preemptions"] == 1,
    }
    assert shown[key]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 1}, "blocks must be a whole number from 2 to 96, not 1."),
        ({"block_size": None}, "block_size must be a whole number from 1 to 32, not None."),
        ({"policy": "lottery"}, "policy must be fcfs or priority, not 'lottery'."),
        ({"requests": []}, "Give between 1 and 12 requests, not 0."),
        ({"blocks": 2}, "needs 3 KV cache blocks, but the whole pool has 2"),
    ],
)
def test_a_form_that_cannot_run_is_answered_with_a_sentence(change: dict[str, Any], message: str) -> None:
    answer = json.loads(Desk().play(json.dumps({**PRESETS["copy"]["settings"], **change})))
    assert message in answer["error"]


def test_two_requests_of_one_name_are_refused() -> None:
    settings = PRESETS["copy"]["settings"]
    with pytest.raises(ValueError, match="Two requests are called 'a'"):
        arrivals({**settings, "requests": settings["requests"] * 2})


def test_without_pyodide_the_page_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ('id="sandbox-form"' in sandbox_build.panel()) == web.is_there("pyodide")
    monkeypatch.setattr(web, "PACKAGES", tmp_path)
    assert "Fetch it with <code>make docs</code> or <code>tools/setup.sh web</code>" in sandbox_build.panel()


@pytest.fixture
def view(browser: Browser, address: str) -> Iterator[View]:
    """The page, before anything was pressed."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
    view = View(context.new_page())
    view.watch()
    view.page.goto(f"{address}/sandbox/")
    yield view
    assert view.complaints == []
    context.close()


def press_run(view: View) -> None:
    view.page.get_by_role("button", name="Run", exact=True).click()
    view.page.wait_for_function(
        "() => document.querySelector('.tw-status').textContent.startsWith('Done')", timeout=PYTHON_STARTS_MS
    )


def read_step(view: View) -> Shown:
    """What stands on the page: the table of block tables, and the sentence."""
    rows: list[tuple[str, str, list[int]]] = view.page.evaluate(
        """() => [...document.querySelectorAll(".tw-tables tr[data-name]")].map((row) => [row.dataset.name,
          row.cells[1].textContent, [...row.querySelectorAll(".tw-chip")].map((chip) => +chip.textContent)])"""
    )
    tokens = {name: 0 if count == "–" else int(count) for name, count, _ in rows}
    return (
        tokens,
        {name: blocks for name, _, blocks in rows},
        view.page.locator(".tw-say").text_content() or "",
    )


def total(view: View, name: str) -> str:
    return (
        view.page.locator(".tw-totals div", has=view.page.get_by_text(name, exact=True))
        .locator("dd")
        .inner_text()
    )


@on_the_site
def test_python_in_the_browser_decides_as_the_engine_does_here(view: View) -> None:
    asked: list[str] = []
    view.page.on("request", lambda request: asked.append(request.url))
    assert not any("pyodide" in url for url in asked)
    for key in PRESETS:
        view.page.locator("[data-preset]").select_option(key)
        press_run(view)
        steps = expected(key)
        for number, step in enumerate(steps):
            assert read_step(view) == step, f"{key}, step {number}"
            view.page.keyboard.press("ArrowRight")
        assert view.page.locator("#sandbox").get_attribute("data-step") == str(len(steps) - 1)
    assert any("pyodide.asm.wasm" in url for url in asked)


@on_the_site
def test_a_changed_form_is_another_run_and_the_page_stays_accessible(view: View) -> None:
    view.page.locator("[data-preset]").select_option("preemption")
    press_run(view)
    assert total(view, "preemptions") == "1"
    assert "preempted c: a needed 1 block" not in (view.page.locator(".tw-why").text_content() or "")
    view.page.locator('.tw-timeline text[data-column="4"]').click()
    assert "preempted c: a needed 1 block" in (view.page.locator(".tw-why").text_content() or "")
    assert serious(view.page) == []
    view.page.locator('.tw-options [data-field="blocks"]').fill("15")
    press_run(view)
    assert total(view, "preemptions") == "0"
    view.page.get_by_role("button", name="remove c").click()
    view.page.locator('.tw-options [data-field="blocks"]').fill("1")
    view.page.get_by_role("button", name="Run", exact=True).click()
    view.page.get_by_text("blocks must be a whole number from 2 to 96, not 1.").wait_for()
    assert view.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
