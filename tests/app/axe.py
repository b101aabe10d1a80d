"""axe-core on a page."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page


def serious(page: Page) -> list[str]:
    """Its serious and critical violations, a line each."""
    return [
        f"{violation['id']}: {node['html'][:160]} {node['failureSummary']}"
        for violation in Axe().run(page).response["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
