"""Random workloads on every architecture: reference = fast = cold oracle, under preemption, cache hits and chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures import ARCHITECTURES
from tests.differential.test_random_workloads import make_workload, run_one
from tests.tiny_models import make_tiny_model

SEEDS = range(8)


# Those with a short window need a smaller pool to preempt anybody, and more of it: `test_sliding_window.py`.
UNBOUNDED = [name for name, fields in ARCHITECTURES.items() if (fields.get("sliding_window") or 512) >= 512]


@pytest.mark.parametrize("name", UNBOUNDED)
def test_random_workloads_are_equal_on_both_tiers_and_to_the_cold_oracle(tmp_path: Path, name: str) -> None:
    model = str(make_tiny_model(tmp_path, seed=1, **ARCHITECTURES[name]))
    paths = [run_one(model, seed) for seed in SEEDS]
    # A run that never takes the interesting paths proves nothing.
    assert sum(path.preempted for path in paths) >= 2
    assert sum(path.cached for path in paths) >= 2
    assert sum(path.copied for path in paths) >= 2
    budgets = [make_workload(seed).config["max_num_batched_tokens"] for seed in SEEDS]
    assert sum(budget < 24 for budget in budgets) >= 2, (
        "longest prompts are 36 tokens: these were cut into chunks"
    )
