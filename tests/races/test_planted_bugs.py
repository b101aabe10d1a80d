"""What the sanitizers find in kernels with one bug each, and that they find nothing in the kernels without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.simt import native
from tests.simt.bugs import BUGS, Bug

RACES = [pytest.param(bug, id=bug.name) for bug in BUGS if bug.race]
ADDRESSES = [pytest.param(bug, id=bug.name) for bug in BUGS if bug.address]
# The build with ThreadSanitizer runs these too, but all that they do is throw before any thread starts.
NO_THREADS = {"too_much_dynamic_shared", "too_many_threads", "too_deep_a_block", "no_threads_at_all"}
RUNNING = sorted(bug.name for bug in BUGS if bug.name not in NO_THREADS)


@pytest.fixture(scope="session")
def tsan(build_folder: Path) -> Path:
    return native.build("planted_bugs", "tsan", build_folder)


@pytest.fixture(scope="session")
def asan(build_folder: Path) -> Path:
    return native.build("planted_bugs", "asan", build_folder)


@pytest.mark.parametrize("when", ["bug", "bug_later"])
@pytest.mark.parametrize("bug", RACES)
def test_race_detection_names_a_line_of_the_race(tsan: Path, bug: Bug, when: str) -> None:
    """Also in a later launch, whose threads ThreadSanitizer knows from an earlier one."""
    result = native.run(tsan, bug.name, when, "0")
    assert "WARNING: ThreadSanitizer: data race" in result.text
    assert result.names("planted_bugs.cu", native.marked_lines(bug.name)), result.text


@pytest.mark.parametrize("seed", ["0", "1"])
@pytest.mark.parametrize("name", RUNNING)
def test_race_detection_says_nothing_about_the_kernel_without_the_bug(
    tsan: Path, name: str, seed: str
) -> None:
    assert native.run(tsan, name, "fixed", seed) == native.Result(0, "ok\n")


@pytest.mark.parametrize("bug", ADDRESSES)
def test_address_checks_name_the_line_of_the_access(asan: Path, bug: Bug) -> None:
    result = native.run(asan, bug.name, "bug", "0")
    assert result.status != 0
    assert re.search(bug.address, result.text), result.text
    if marked := native.marked_lines(bug.name):
        assert result.names("planted_bugs.cu", marked), result.text
    else:
        assert "paged_attention.cuh" in result.text


@pytest.mark.parametrize("name", RUNNING)
def test_address_checks_say_nothing_about_the_kernel_without_the_bug(asan: Path, name: str) -> None:
    assert native.run(asan, name, "fixed", "1") == native.Result(0, "ok\n")
