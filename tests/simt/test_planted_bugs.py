"""What an ordinary build of the emulator finds by itself: exceptions, and wrong values from poison and fiber order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.simt import native
from tests.simt.bugs import BUGS, Bug

THROWN = [pytest.param(bug, id=bug.name) for bug in BUGS if bug.error]
SEEN = [pytest.param(bug, id=bug.name) for bug in BUGS if bug.wrong]


@pytest.fixture(scope="session")
def program(build_folder: Path) -> Path:
    return native.build("planted_bugs", "plain", build_folder)


@pytest.mark.parametrize("bug", THROWN)
def test_the_error_says_what_is_wrong_and_names_block_thread_and_line(program: Path, bug: Bug) -> None:
    result = native.run(program, bug.name, "bug", "0")
    assert result.status == 3
    assert re.search(bug.error, result.text)
    if marked := native.marked_lines(bug.name):
        assert result.names("tests/simt/planted_bugs.cu", marked), result.text
        assert re.match(r"error: block \(\d+,0,0\) thread \(\d+,0,0\) at ", result.text)


@pytest.mark.parametrize("bug", THROWN)
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_error_is_found_in_any_order_of_threads(program: Path, bug: Bug, seed: str) -> None:
    result = native.run(program, bug.name, "bug", seed)
    assert result.status == 3, result.text


@pytest.mark.parametrize("bug", SEEN)
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_poison_and_fiber_order_give_wrong_values(program: Path, bug: Bug, seed: str) -> None:
    assert native.run(program, bug.name, "bug", seed).status == 2


@pytest.mark.parametrize("seed", ["0", "1", "2"])
@pytest.mark.parametrize("name", [bug.name for bug in BUGS])
def test_the_same_kernel_without_the_bug_is_right(program: Path, name: str, seed: str) -> None:
    assert native.run(program, name, "fixed", seed) == native.Result(0, "ok\n")


def test_every_planted_bug_has_a_detector(program: Path) -> None:
    assert sorted(native.run(program, "--list").text.split()) == sorted(bug.name for bug in BUGS)
    assert all(bug.error or bug.wrong or bug.address or bug.race for bug in BUGS)
