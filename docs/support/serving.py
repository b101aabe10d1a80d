"""What a server of each generation does with the same requests and the same memory: see docs/why-serving-is-hard.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from docs.support.runs import Arrival, run, run_static
from reference.contracts.trace import StepTrace

LONGEST = 256  # tokens that a sequence may become
POOL = 4096  # tokens that the memory for K and V holds
BATCH = POOL // LONGEST  # requests whose longest fits: as many as a contiguous server can run


@dataclass(frozen=True)
class Serving:
    """One way to serve, and every step of it."""

    name: str
    block_size: int
    traces: list[StepTrace]

    @property
    def steps(self) -> int:
        return len(self.traces)

    @property
    def requests_at_once(self) -> float:
        return float(np.mean([len(trace.state.running) for trace in self.traces]))

    @property
    def share_used(self) -> float:
        """Tokens with K and V, of the places that are set aside for somebody; mean of the steps."""
        used = sum(sum(trace.state.num_computed_tokens.values()) for trace in self.traces)
        held = sum(len(trace.state.cache.ref_counts) * self.block_size for trace in self.traces)
        return used / held

    def latencies(self) -> dict[str, int]:
        """Steps from the arrival of each request, which is step 0 for all, to its end."""
        return {name: number + 1 for number, trace in enumerate(self.traces) for name in trace.finished}


def crowd(size: int = 48, seed: int = 0) -> list[Arrival]:
    """Requests as they come: most are short, a few are long, and nobody knows which. All arrive at once."""
    generator = np.random.default_rng(seed)
    prompts = np.clip(generator.lognormal(3.0, 0.7, size), 4, 120).astype(int)  # [size]
    outputs = np.clip(generator.lognormal(3.2, 0.8, size), 2, 120).astype(int)  # [size]
    # Prompts that nobody shares: what is measured is batching and memory, not the prefix cache.
    return [
        Arrival(f"r{i:02}", [i] + [999] * (int(prompt) - 1), int(output))
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


@cache
def generations() -> Sequence[Serving]:
    """The same crowd in the same memory, served in three ways by the same scheduler."""
    contiguous = {"block_size": LONGEST, "blocks": POOL // LONGEST, "budget": 2048, "caching": False}
    paged = contiguous | {"block_size": 16, "blocks": POOL // 16}
    everybody = crowd()
    return (
        Serving("static batch, contiguous", LONGEST, run_static(*everybody, batch_size=BATCH, **contiguous)),
        Serving("continuous, contiguous", LONGEST, run(*everybody, **contiguous)),
        Serving("continuous, paged", 16, run(*everybody, **paged)),
    )
