"""The planted bugs and the tool that judges the tests by them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fast.block_pool import BlockPool
from tests.mutants import MUTANTS, Mutant
from tools import run_mutants

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_more_than_twenty_bugs_and_a_change_that_is_none() -> None:
    assert sum(not mutant.changes_nothing for mutant in MUTANTS.values()) >= 20
    assert any(mutant.changes_nothing for mutant in MUTANTS.values())


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_each_has_a_lesson_of_one_sentence_and_names_tests_that_exist(mutant: Mutant) -> None:
    assert re.fullmatch(r"[A-Z\[0-9t].*\.", mutant.lesson)
    assert mutant.killed_by
    for name in mutant.killed_by:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert not function or function in functions


def test_a_mutant_is_planted_for_the_duration_of_a_block_and_leaves_nothing_behind() -> None:
    original = BlockPool.touch
    with MUTANTS["hits_not_touched"].planted("fast"):
        assert BlockPool.touch is not original
        pool = BlockPool(4)
        pool.touch([2])
        assert pool.ref_count[2] == 0
    assert BlockPool.touch is original
    pool = BlockPool(4)
    pool.touch([2])
    assert pool.ref_count[2] == 1


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_each_can_be_planted_wherever_it_says(mutant: Mutant) -> None:
    for tier_name in mutant.tiers:
        with mutant.planted(tier_name):
            pass


def test_a_tier_that_a_mutant_is_not_for_is_refused() -> None:
    with pytest.raises(ValueError, match="hash_chain_forgotten is for fast, not for reference."):
        MUTANTS["hash_chain_forgotten"].planted("reference").__enter__()


def test_the_tool_kills_a_bug_and_lets_a_change_without_effect_live(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_mutants.main(["salt_forgotten", "hash_chain_forgotten"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 of 2 killed, 1 of 1 survived as expected"
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["salt_forgotten", "reference"],
        ["salt_forgotten", "fast"],
        ["hash_chain_forgotten", "fast"],
    ]


def result(name: str, **outcomes: list[str | None]) -> run_mutants.Result:
    mutant = MUTANTS[name]
    tests = {f"tests/{test}": outcomes.get("errors", []) for test in mutant.killed_by if outcomes}
    return run_mutants.Result(mutant, mutant.tiers[0], 0.0, tests, "pytest's last line")


@pytest.mark.parametrize(
    ("name", "errors", "verdict"),
    [
        ("salt_forgotten", [None], "SURVIVED test_b05_the_same_salt_hits_and_another_salt_or_none_misses"),
        ("salt_forgotten", ["KeyError", None], "crashed: KeyError"),
        ("hash_chain_forgotten", ["AssertionError"], "killed, but it changes nothing"),
    ],
)
def test_a_mutant_that_behaves_otherwise_makes_the_run_fail(
    name: str, errors: list[str | None], verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = result(name, errors=errors)
    assert bad.verdict == verdict
    assert not run_mutants.report([bad])
    assert capsys.readouterr().out.strip().startswith("0 of ")


def test_a_mutant_whose_tests_were_not_run_is_not_killed() -> None:
    bad = result("salt_forgotten")
    assert bad.verdict == "no test was run: pytest's last line"
    assert not bad.is_as_expected


def test_one_failing_case_of_a_test_kills() -> None:
    good = result("salt_forgotten", errors=[None, "AssertionError"])
    assert good.verdict == "test_b05_the_same_salt_hits_and_another_salt_or_none_misses"
    assert good.is_as_expected


def test_an_unknown_mutant_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_mutants.main(["nonsense"]) == 2
    assert "no mutant called nonsense; there are hash_without_parent" in capsys.readouterr().err
