"""Fixtures shared by all suites. Every spec runs on both tiers through `tier`."""

from __future__ import annotations

import os

# Before NumPy and torch start their thread pools: xdist already uses every core.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import pytest

from reference.contracts.protocols import Tier
from reference.frontend.logger import LEVEL_VARIABLE
from reference.frontend.tiers import load_tier


@pytest.fixture(autouse=True)
def default_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's shell, or a program run by an earlier test, has asked for does not count."""
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)


@pytest.fixture(params=["reference", "fast"])
def tier_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tier(tier_name: str) -> Tier:
    return load_tier(tier_name)
