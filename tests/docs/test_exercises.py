"""The exercises of the tutorial: solutions pass, what is not written yet fails, and a mistake is told in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference.frontend.cli import main
from reference.frontend.learn import Exercise, find_exercises, find_folder, grade, learn

EXERCISES = find_exercises(find_folder())


def by_name(exercise: Exercise) -> str:
    return exercise.path.stem


def write_answer(tmp_path: Path, text: str) -> Path:
    """An answer to exercise 01."""
    path = tmp_path / "01_blocks.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_name)
def test_the_solution_passes_every_check(exercise: Exercise) -> None:
    complaints = {outcome.sentence: outcome.complaint for outcome in grade(exercise, exercise.solution)}
    assert complaints
    assert set(complaints.values()) == {None}, complaints


@pytest.mark.parametrize("exercise", EXERCISES, ids=by_name)
def test_the_unwritten_exercise_fails_and_has_a_task_and_hints(exercise: Exercise) -> None:
    assert any(outcome.complaint for outcome in grade(exercise))
    assert len(exercise.task.splitlines()) > 2
    assert len(exercise.hints) >= 2


def test_there_are_at_least_25_numbered_without_gaps() -> None:
    assert len(EXERCISES) >= 25
    assert [exercise.number for exercise in EXERCISES] == [f"{i + 1:02}" for i in range(len(EXERCISES))]


def test_a_wrong_answer_is_told_with_what_is_right(tmp_path: Path) -> None:
    answer = "def blocks_needed(n, b): return n // b\ndef empty_slots(n, b): return 0\n"
    complaints = [outcome.complaint for outcome in grade(EXERCISES[0], write_answer(tmp_path, answer))]
    assert complaints[0] is None
    assert complaints[1] == "blocks_needed(17, 16) gives 1, but 2 is right."


def test_an_exception_in_the_answer_is_told_with_its_line(tmp_path: Path) -> None:
    answer = "def blocks_needed(n, b):\n    return n // 0\n"
    outcome = grade(EXERCISES[0], write_answer(tmp_path, answer))[0]
    assert outcome.complaint is not None
    assert "ZeroDivisionError" in outcome.complaint
    assert "(line 2 of 01_blocks.py)" in outcome.complaint


@pytest.mark.parametrize(
    ("answer", "name"), [("def blocks_needed(:\n", "SyntaxError"), ("", "AttributeError")]
)
def test_a_file_that_cannot_be_used_is_told(tmp_path: Path, answer: str, name: str) -> None:
    outcome = grade(EXERCISES[0], write_answer(tmp_path, answer))[0]
    assert outcome.complaint is not None
    assert name in outcome.complaint


def test_hints_come_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "05", "--hint"]) == 0
    first = capsys.readouterr().out
    assert main(["learn", "block_hash", "--hint", "--hint"]) == 0
    both = capsys.readouterr().out
    hints = EXERCISES[4].hints
    assert hints[0] in first
    assert hints[1] not in first
    assert all(hint in both for hint in hints[:2])


def test_grading_an_unwritten_exercise_says_where_the_task_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "5"]) == 1
    printed = capsys.readouterr().out
    assert "not written yet" in printed
    assert "docs/exercises/05_block_hash.py" in printed


def test_an_unknown_exercise_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "99"]) == 2
    assert "There is no exercise '99'; there are 01 to" in capsys.readouterr().err


def test_the_list_marks_what_is_solved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "docs" / "exercises"
    for part in ("", "checks", "solutions"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for number in ("01_blocks", "06_longest_hit"):
            source = EXERCISES[0].path.parent / part / f"{number}.py"
            (folder / part / source.name).write_text(source.read_text())
    solution = (folder / "solutions" / "01_blocks.py").read_text()
    (folder / "01_blocks.py").write_text(f'"""How many blocks?"""\n{solution}')
    assert learn(None, folder=folder) == 0
    printed = capsys.readouterr().out
    assert "✓ 01" in printed
    assert "· 06" in printed
    assert "1 of 2 solved" in printed
