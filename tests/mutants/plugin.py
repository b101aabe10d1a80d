"""pytest with a bug planted: `pytest -p tests.mutants.plugin --mutant NAME --mutant-tier TIER TEST...`.

The mutant is planted before any test module is imported, and stays. Of tests that run on both tiers only the cases of
its tier are run.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mutants import MUTANTS


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants")
    group.addoption("--mutant", choices=sorted(MUTANTS), help="the bug to plant")
    group.addoption("--mutant-tier", default="shared", help="the tier to plant it in")
    group.addoption("--mutant-report", type=Path, help="file for the outcome of each test, as JSON")


class Planted:
    """Keeps the mutant planted, and notes what became of each test."""

    def __init__(self, config: pytest.Config) -> None:
        self.tier_name: str = config.option.mutant_tier
        self.report: Path | None = config.option.mutant_report
        self.outcomes: dict[
            str, list[str | None]
        ] = {}  # test without its case -> error of each case, None if none
        self.stack = ExitStack()
        if config.option.mutant is not None:
            self.stack.enter_context(MUTANTS[config.option.mutant].planted(self.tier_name))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        other = {"reference": "fast", "fast": "reference"}.get(self.tier_name)
        dropped = [item for item in items if _case(item) == other]
        if other is not None and dropped:
            items[:] = [item for item in items if item not in dropped]
            config.hook.pytest_deselected(items=dropped)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed or report.when == "call":
            name = item.nodeid.partition("[")[0]
            error = call.excinfo.typename if report.failed else None
            self.outcomes.setdefault(name, []).append(error)
        return report

    def pytest_unconfigure(self) -> None:
        self.stack.close()
        if self.report is not None:
            self.report.write_text(json.dumps(self.outcomes))


def _case(item: pytest.Item) -> object:
    """The tier that a test runs on in this case; None if it is not a matter of tiers."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("tier_name")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Planted(config), "planted mutant")
