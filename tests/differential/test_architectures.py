"""Random workloads on every architecture: reference = fast = cold oracle, under preemption, cache hits and chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures import ARCHITECTURES
from tests.differential.test_random_workloads import make_workload, run_one
from tests.tiny_models import make_tiny_model

SEEDS = range(8)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_workloads_are_equal_on_both_tiers_and_to_the_cold_oracle(tmp_path: Path, name: str) -> None:
    models = (str(make_tiny_model(tmp_path, seed=1, **ARCHITECTURES[name])),)
    reports = [run_one(models, seed)[0] for seed in SEEDS]
    for seed, report in zip(SEEDS, reports, strict=True):
        assert report.divergence is None, f"workload {seed}: {report.divergence}"
        assert report.excused == [], f"workload {seed}"
    # A run that never takes the interesting paths proves nothing.
    assert sum(report.num_preemptions > 0 for report in reports) >= 2
    assert sum(report.num_cached_tokens > 0 for report in reports) >= 2
    budgets = [make_workload(seed).config["max_num_batched_tokens"] for seed in SEEDS]
    assert sum(budget < 24 for budget in budgets) >= 2, (
        "longest prompts are 36 tokens: these were cut into chunks"
    )
