"""Random workloads on the real 135M-parameter model: reference = fast = cold oracle (`tests/fuzz.py`)."""

from __future__ import annotations

import pytest

from tests.fuzz import assert_paths_were_taken, check_seeds
from tests.workloads import EMBEDDED

pytestmark = pytest.mark.embedded

NUM_WORKLOADS = 12
NUM_PARTS = 2


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_workloads_are_equal_on_both_tiers_and_to_the_cold_oracle(part: int) -> None:
    seeds = range(NUM_WORKLOADS)[part::NUM_PARTS]
    assert_paths_were_taken(check_seeds(lambda _: "smollm2-135m", seeds, EMBEDDED))
