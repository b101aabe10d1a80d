"""Twin of `reference/async_llm.py`: `AsyncLLM` with its tier fixed to `fast`. Nothing else differs."""

from __future__ import annotations

from fast.tier import TIER
from reference.frontend.async_engine import AsyncLLM as FrontendAsyncLLM


class AsyncLLM(FrontendAsyncLLM):
    """The engine for servers on the `fast` tier: `await AsyncLLM.from_engine_args(EngineArgs(...))`."""

    default_tier = TIER
