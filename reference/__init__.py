"""The engine to read: every idea of a modern LLM server in plain NumPy.

Start at `reference.frontend.engine_core.EngineCore.step`: it is three calls. `import reference` costs nothing and never
imports torch; the names below load what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reference.async_llm import AsyncLLM
    from reference.contracts.sampling_params import SamplingParams
    from reference.contracts.structured_outputs import StructuredOutputsParams
    from reference.llm import LLM
    from reference.tier import TIER

__all__ = ["LLM", "TIER", "AsyncLLM", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from reference.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from reference.async_llm import AsyncLLM

        return AsyncLLM
    if name == "SamplingParams":
        from reference.contracts.sampling_params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from reference.contracts.structured_outputs import StructuredOutputsParams

        return StructuredOutputsParams
    if name == "TIER":
        from reference.tier import TIER

        return TIER
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
