"""The engine to use: the same files as `reference`, each the optimised twin, with C++ kernels from `csrc/`.

Each module's docstring links its twin and lists only what differs and why it is faster.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# OpenMP threads that wait by spinning collapse beside any other load. Measured on two cores with a neighbour burning
# one, embedded model, one request: below 3 tokens/s by default, 30 with this; 53 instead of 55 on a quiet machine.
# It is read when the library is loaded, so it must be set before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from fast.async_llm import AsyncLLM
    from fast.llm import LLM
    from fast.tier import TIER
    from reference.contracts.sampling_params import SamplingParams
    from reference.contracts.structured_outputs import StructuredOutputsParams

__all__ = ["LLM", "TIER", "AsyncLLM", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from fast.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from fast.async_llm import AsyncLLM

        return AsyncLLM
    if name == "SamplingParams":
        from reference.contracts.sampling_params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from reference.contracts.structured_outputs import StructuredOutputsParams

        return StructuredOutputsParams
    if name == "TIER":
        from fast.tier import TIER

        return TIER
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
