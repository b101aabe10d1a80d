"""The exercises of the tutorial, and their grader: `twinfer learn`.

docs/exercises/05_block_hash.py             the task in its docstring, HINTS, and a function to be written
docs/exercises/checks/05_block_hash.py      what is expected of it: readable, and checked against the engine itself
docs/exercises/solutions/05_block_hash.py   one way to write it
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

Check = Callable[[ModuleType], None]


def expect(call: str, got: Any, wanted: Any) -> None:
    """Raises AssertionError unless the two are equal, with a sentence that names the call."""
    if got != wanted:
        raise AssertionError(f"{call} gives {got!r}, but {wanted!r} is right.")


@dataclass(frozen=True)
class Exercise:
    """One exercise of a folder. `number` is what its file name begins with: "05"."""

    path: Path

    @property
    def number(self) -> str:
        return self.path.stem.split("_")[0]

    @property
    def task(self) -> str:
        return (ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or "").strip()

    @property
    def title(self) -> str:
        return self.task.splitlines()[0].rstrip(".")

    @property
    def solution(self) -> Path:
        return self.path.parent / "solutions" / self.path.name

    @property
    def hints(self) -> Sequence[str]:
        """Read, not run: hints are there while the file is half written."""
        for node in ast.parse(self.path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "HINTS":
                hints: Sequence[str] = ast.literal_eval(node.value)
                return hints
        return ()

    def checks(self) -> list[Check]:
        """The functions `check_...` of its checks, in the order in which they are written."""
        root = str(self.path.parents[2])
        if root not in sys.path:
            sys.path.append(root)  # some checks use what the tests are made of
        module = load(self.path.parent / "checks" / self.path.name)
        return [value for name, value in vars(module).items() if name.startswith("check_")]


@dataclass(frozen=True)
class Outcome:
    """What a check says: its sentence, and why it does not hold; None when it does."""

    sentence: str
    complaint: str | None


def load(path: Path) -> ModuleType:
    """A Python file as a module, whatever its name."""
    spec = importlib.util.spec_from_file_location(f"exercise_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_folder() -> Path:
    """Where the exercises lie: in this repository. Raises ValueError when only the package is installed."""
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        folder = root / "docs" / "exercises"
        if folder.is_dir():
            return folder
    raise ValueError(
        "The exercises come with the repository, not with the package: run this in a clone of it."
    )


def find_exercises(folder: Path) -> list[Exercise]:
    return [Exercise(path) for path in sorted(folder.glob("[0-9][0-9]_*.py"))]


def find_exercise(folder: Path, name: str) -> Exercise:
    """By number ("5", "05") or by name ("block_hash"). Raises ValueError when there is none."""
    exercises = find_exercises(folder)
    for exercise in exercises:
        if name in (exercise.number, exercise.number.lstrip("0"), exercise.path.stem, exercise.path.stem[3:]):
            return exercise
    raise ValueError(
        f"There is no exercise {name!r}; there are {exercises[0].number} to {exercises[-1].number}."
    )


def grade(exercise: Exercise, path: Path | None = None) -> list[Outcome]:
    """Run the checks of an exercise on its file, or on another one."""
    path = path or exercise.path
    outcomes = []
    for check in exercise.checks():
        sentence = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            check(load(path))  # afresh for each check: what one leaves behind must not help another
            complaint = None
        except AssertionError as error:
            complaint = str(error) or f"this does not hold: {_last_line(error)}"
        except NotImplementedError:
            complaint = "it is not written yet."
        except Exception as error:
            complaint = f"it raised {type(error).__name__}: {error}{_where(error, path)}"
        outcomes.append(Outcome(sentence, complaint))
    return outcomes


def _last_line(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].line or ""


def _where(error: BaseException, path: Path) -> str:
    """Where in the reader's own file it happened: the deepest line of it that is on the stack."""
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return f" (line {lines[-1]} of {path.name})" if lines else ""


def learn(name: str | None, num_hints: int = 0, folder: Path | None = None) -> int:
    """List the exercises, or grade one of them; with `num_hints`, show so many of its hints instead.

    Returns:
        0 when what was asked for holds, 1 when a check complains.
    """
    folder = folder or find_folder()
    console = Console(highlight=False, soft_wrap=True)
    if name is None:
        return _list(folder, console)
    exercise = find_exercise(folder, name)
    if num_hints:
        return _show_hints(exercise, num_hints, console)
    outcomes = grade(exercise)
    console.print(f"[bold]{exercise.number}  {exercise.title}[/]", markup=True)
    for outcome in outcomes:
        mark = "[green]✓[/]" if outcome.complaint is None else "[red]✗[/]"
        console.print(f"  {mark} {outcome.sentence}")
        if outcome.complaint is not None:
            console.print(f"      {outcome.complaint}", markup=False)
    if all(outcome.complaint is None for outcome in outcomes):
        console.print(
            "  Solved. The solution that comes with it:", exercise.solution.relative_to(folder.parent.parent)
        )
        return 0
    where = exercise.path.relative_to(folder.parent.parent)
    console.print(
        f"  The task is in {where}; twinfer learn {exercise.number} --hint shows a hint.", markup=False
    )
    return 1


def _list(folder: Path, console: Console) -> int:
    exercises = find_exercises(folder)
    num_solved = 0
    for exercise in exercises:
        is_solved = all(outcome.complaint is None for outcome in grade(exercise))
        num_solved += is_solved
        mark = "[green]✓[/]" if is_solved else "·"
        console.print(f"  {mark} {exercise.number}  {exercise.title}")
    console.print(
        f"\n{num_solved} of {len(exercises)} solved. twinfer learn 01 grades docs/exercises/01_*.py."
    )
    return 0


def _show_hints(exercise: Exercise, num_hints: int, console: Console) -> int:
    hints = exercise.hints
    for number, hint in enumerate(hints[:num_hints], start=1):
        console.print(f"{number}. {hint}", markup=False)
    if num_hints < len(hints):
        more = " ".join(["--hint"] * (num_hints + 1))
        console.print(f"twinfer learn {exercise.number} {more} shows one more of {len(hints)}.", markup=False)
    return 0
