"""The machine of `test_scheduler_machine`, with a sliding window: entries of tables become null on both tiers alike."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis.stateful import initialize

from reference.contracts.config import EngineConfig
from tests.property.test_scheduler_machine import TestTwoTiers, TwoTiers, configs


class TwoTiersWithWindow(TwoTiers):
    """Prompts have up to 34 tokens and outputs 12, so that most windows are passed."""

    @initialize(config=configs(), window=st.sampled_from([1, 2, 4, 5, 8, 13, 32]))
    def start(self, config: EngineConfig, window: int) -> None:
        super().start(config=replace(config, cache=replace(config.cache, sliding_window=window)))


TestTwoTiersWithWindow = TwoTiersWithWindow.TestCase
TestTwoTiersWithWindow.settings = TestTwoTiers.settings
del TestTwoTiers  # pytest would run it here as well
