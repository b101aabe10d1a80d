"""Pages that are made from the program: every command, every benchmark and every ladder is on them."""

from __future__ import annotations

import re

import pytest

from docs.support import reference
from fast import kernels


def test_every_command_and_benchmark_has_its_help_text() -> None:
    for name in reference.command_names():
        assert reference.command_help(name).startswith(f"usage: twinfer {name}")
    for name in reference.benchmark_names():
        assert reference.command_help("bench", name).startswith(f"usage: twinfer bench {name}")


def test_a_command_that_does_not_exist_is_no_page() -> None:
    assert reference.main(["no-such-command", "--help"]) == 2


@pytest.mark.parametrize("operation", sorted(kernels.ladder("simt").rungs))
def test_every_rung_is_on_a_card(operation: str) -> None:
    rungs = kernels.ladder("simt").rungs[operation]
    cards = reference.kernel_cards().values()
    assert any(all(re.search(rf"^\s*{rung}\b", card, re.MULTILINE) for rung in rungs) for card in cards), (
        rungs
    )
