"""Random workloads on the real 135M-parameter model: reference = fast = cold oracle (`tests/fuzz.py`)."""

from __future__ import annotations

import pytest

from tests.fuzz import FLOORS, assert_paths_were_taken, check_seeds
from tests.workloads import EMBEDDED

pytestmark = pytest.mark.embedded

NUM_WORKLOADS = 12
NUM_PARTS = 2
# Random prompts hold nothing that a look-up could guess from, and few workloads ask for the prompt's logprobs.
REQUIRED = {
    name: share for name, share in FLOORS.items() if name not in ("accepted drafts", "scored prompts")
}


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_workloads_are_equal_on_both_tiers_and_to_the_cold_oracle(part: int) -> None:
    seeds = range(NUM_WORKLOADS)[part::NUM_PARTS]
    assert_paths_were_taken(check_seeds(lambda _: "smollm2-135m", seeds, EMBEDDED), REQUIRED)
