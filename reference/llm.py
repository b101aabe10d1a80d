"""`LLM` with its tier fixed: all of it is written once, in `reference.frontend.llm`."""

from __future__ import annotations

from typing import Any

from reference.frontend.llm import LLM as FrontendLLM
from reference.tier import TIER


class LLM(FrontendLLM):
    """Offline generation on the `reference` tier; options as in `reference.frontend.engine_args.EngineArgs`."""

    def __init__(self, model: str = "smollm2-135m", **options: Any) -> None:
        super().__init__(TIER, model=model, **options)
