"""One built program a worker: the tests that need it are grouped, so that no two workers build the same."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where objects are kept for all programs that this worker builds."""
    return tmp_path_factory.mktemp("native")
