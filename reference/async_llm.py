"""`AsyncLLM` with its tier fixed: all of it is written once, in `reference.frontend.async_engine`."""

from __future__ import annotations

from reference.frontend.async_engine import AsyncLLM as FrontendAsyncLLM
from reference.tier import TIER


class AsyncLLM(FrontendAsyncLLM):
    """The engine for servers on the `reference` tier: `await AsyncLLM.from_engine_args(EngineArgs(...))`."""

    default_tier = TIER
