"""One `StepTrace` a step: what the engine decided, and what the cache looked like when it had decided.

It is the single source for comparing the tiers step by step and for showing a run. A snapshot is taken after
`schedule()` and before the forward pass: tables already hold the blocks of this step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CacheSnapshot:
    """State of block pool and block tables."""

    block_tables: dict[str, tuple[int, ...]]  # request id -> physical blocks, in logical order
    ref_counts: dict[int, int]  # blocks with at least one holder
    free_order: tuple[int, ...]  # the head is handed out next
    hashes: dict[int, str]  # hex hash of every block that the prefix cache can find

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_order)


@dataclass(frozen=True)
class SchedulerSnapshot:
    """State of the queues, in order, with the cache."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    num_computed_tokens: dict[str, int]  # of the running, already advanced by this step
    cache: CacheSnapshot


@dataclass(frozen=True)
class StepTrace:
    """One step of the engine."""

    step: int
    num_scheduled_tokens: dict[str, int]
    num_cached_tokens: dict[str, int]  # prefix-cache hits of the requests admitted in this step
    preempted: tuple[str, ...]
    state: SchedulerSnapshot
    sampled_token_ids: dict[str, tuple[int, ...]]
    finished: dict[str, str]  # request id -> finish reason
    seconds: float  # wall time of the step; the only field that may differ between two equal runs

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
