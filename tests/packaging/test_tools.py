"""The project's own tools: what counts as a line of code, and what counts as a green run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools import loc, run_tests

ROOT = Path(__file__).resolve().parents[2]

SOURCE = '''"""Module docstring
of two lines."""

import os  # counts


class Record:
    """Not code."""

    field: int = 0
    """Not code either."""

    def method(self) -> str:
        # not code
        return """text
        of two lines"""
'''


def test_comments_blank_lines_and_docstrings_are_no_lines_of_code() -> None:
    assert loc.count_code_lines(SOURCE) == 6


def test_every_python_file_of_both_tiers_and_the_app_is_counted_once() -> None:
    counted = [path for group in loc.GROUPS for path in group.files()]
    expected = [path for tier in ("reference", "fast", "app") for path in (ROOT / tier).rglob("*.py")]
    assert sorted(counted) == sorted(expected)


def make_suite(root: Path, name: str, source: str) -> None:
    folder = root / "tests" / name
    folder.mkdir(parents=True)
    (folder / f"test_{name}.py").write_text(source, encoding="utf-8")


def test_a_suite_without_any_test_counts_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_suite(tmp_path, "empty", "")
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    result = run_tests.run_suite("empty")
    assert (result.passed, result.failed) == (0, 1)
    assert "exit status 5" in result.closing


def test_all_suites_run_and_the_last_line_adds_them_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_suite(tmp_path, "spec", "def test_a():\n    assert False\n")
    skipping = "import pytest\n\n\ndef test_b():\n    pytest.skip('never')\n\n\ndef test_c():\n    pass\n"
    make_suite(tmp_path, "other", skipping)
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    assert run_tests.find_suites() == ["spec", "other"]
    assert run_tests.main(["spec", "other"]) == 1
    lines = capfd.readouterr().out.strip().splitlines()
    assert lines[-1] == "1 passed, 1 failed, 1 skipped"
    assert any(re.match(r"spec +\d+\.\d +1 failed in ", line) for line in lines[-5:])
    assert any(re.match(r"other +\d+\.\d +1 passed, 1 skipped in ", line) for line in lines[-5:])


def test_the_races_run_only_when_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("spec", "races"):
        make_suite(tmp_path, name, "")
    ran: list[str] = []

    def record(name: str) -> run_tests.SuiteResult:
        ran.append(name)
        return run_tests.SuiteResult(name, 0.0, 1, 0, 0, "1 passed")

    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "run_suite", record)
    monkeypatch.setattr(run_tests, "run_lint", lambda: record("lint"))
    assert run_tests.main([]) == 0
    assert run_tests.main(["races"]) == 0
    assert ran == ["lint", "spec", "races"]


def test_an_unknown_suite_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tests.main(["kernel"]) == 2
    assert "no suite called kernel; there are lint, spec" in capsys.readouterr().err


def test_make_without_a_target_lists_every_target() -> None:
    listed = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"^  make (\S+)", listed.stdout, re.MULTILINE) == phony.split()
