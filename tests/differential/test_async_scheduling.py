"""Random workloads with a step always in flight: reference = fast = cold oracle, as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz import FLOORS, assert_paths_were_taken, check_seeds
from tests.tiny_models import make_tiny_llama
from tests.workloads import TINY

SEEDS = range(40)
WITHOUT_DRAFTS = replace(TINY, speculators=("",))  # nobody guesses behind a token that is not known yet


@pytest.mark.parametrize("part", range(2))
def test_random_workloads_are_equal_on_both_tiers_and_to_the_cold_oracle(tmp_path: Path, part: int) -> None:
    model = str(make_tiny_llama(tmp_path, seed=3, max_position=128))
    paths = check_seeds(lambda _: model, SEEDS[part::2], WITHOUT_DRAFTS, async_scheduling=True)
    floors = {name: least for name, least in FLOORS.items() if name != "accepted drafts"}
    assert_paths_were_taken(paths, floors)
