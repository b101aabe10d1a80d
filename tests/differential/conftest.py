"""Hundreds of engines are started here: what each says of itself would bury the message of a failure."""

from __future__ import annotations

import pytest

from reference.frontend.logger import LEVEL_VARIABLE


@pytest.fixture(autouse=True)
def quiet_engines(default_log_level: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "WARNING")
