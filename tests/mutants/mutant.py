"""What a planted bug is: a patch from outside, the lesson in it, and the tests that must notice it.

Nothing in `reference/` or `fast/` knows of mutants. A mutant overrides a method or a function of one tier for as long
as it is planted:

    with MUTANTS["cow_appends"].planted("reference"):
        ...  # in here copy-on-write is wrong

(The idea of judging tests by the bugs they catch: DeMillo, Lipton and Sayward, "Hints on test data selection", 1978.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any
from unittest import mock

TIERS = ("reference", "fast")
SHARED = ("shared",)  # in what is written once for both


class Plant:
    """Patches one tier, until the stack is closed."""

    def __init__(self, tier_name: str, stack: ExitStack) -> None:
        self.tier_name = tier_name
        self._stack = stack

    def module(self, name: str) -> ModuleType:
        """A mirrored module of the tier, say `block_pool`."""
        return importlib.import_module(f"{self.tier_name}.{name}")

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Raises AttributeError when the owner has no such attribute: the code has moved on, the mutant must follow."""
        self._stack.enter_context(mock.patch.object(owner, name, value))

    def override(self, owner: Any) -> Callable[[Callable[..., Any]], None]:
        """Decorator: put a function in place of the owner's of that name; its first argument is what it replaces."""

        def decorate(function: Callable[..., Any]) -> None:
            original = getattr(owner, function.__name__)

            @wraps(original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return function(original, *args, **kwargs)

            self.replace(owner, function.__name__, replacement)

        return decorate


@dataclass(frozen=True)
class Mutant:
    """A bug that can be planted.

    Attributes:
        lesson: the rule it breaks, and what that leads to, in a sentence.
        tiers: where it can be planted: of TIERS, or SHARED.
        killed_by: node ids of tests (functions, or whole files) relative to tests/; each of them must fail. Of tests
            that run on both tiers, the cases of the other tier do not count.
        changes_nothing: it is as right as the original, and all those tests must pass.
        plant: does the patching.
    """

    name: str
    lesson: str
    tiers: tuple[str, ...]
    killed_by: tuple[str, ...]
    plant: Callable[[Plant], None]
    changes_nothing: bool = False

    @contextmanager
    def planted(self, tier_name: str) -> Iterator[None]:
        """Plant it for the duration of a `with` block.

        Raises:
            ValueError: it has no form for that tier.
        """
        if tier_name not in self.tiers:
            raise ValueError(f"{self.name} is for {' and '.join(self.tiers)}, not for {tier_name}.")
        with ExitStack() as stack:
            self.plant(Plant(tier_name, stack))
            yield


MUTANTS: dict[str, Mutant] = {}


def mutant(
    lesson: str,
    killed_by: Sequence[str],
    tiers: tuple[str, ...] = TIERS,
    changes_nothing: bool = False,
) -> Callable[[Callable[[Plant], None]], Callable[[Plant], None]]:
    """Decorator: enter a planting function into MUTANTS under its own name."""

    def decorate(plant: Callable[[Plant], None]) -> Callable[[Plant], None]:
        name = plant.__name__
        assert name not in MUTANTS, f"there are two mutants called {name}"
        MUTANTS[name] = Mutant(name, lesson, tiers, tuple(killed_by), plant, changes_nothing)
        return plant

    return decorate
