"""The step that the scheduler is planning.

A plan is complete only when the last running request has its tokens: until then the blocks that one request needs may
cost another its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from reference.contracts.request import Request


@dataclass
class Plan:
    """The step being planned; a victim of preemption can still be taken out of it."""

    token_budget: int
    chunk_limit: int  # tokens one request may get, 0 = no limit
    requests: list[Request] = field(default_factory=list)  # in scheduling order
    num_tokens: dict[str, int] = field(default_factory=dict)
    new_blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)  # of those admitted in this step
    preempted: list[Request] = field(default_factory=list)

    def add(
        self,
        request: Request,
        num_tokens: int,
        new_blocks: Iterable[int],
        num_cached_tokens: int | None = None,
    ) -> None:
        self.requests.append(request)
        self.num_tokens[request.request_id] = num_tokens
        self.new_blocks[request.request_id] = tuple(new_blocks)
        self.token_budget -= num_tokens
        if num_cached_tokens is not None:
            self.num_cached_tokens[request.request_id] = num_cached_tokens

    def take_back(self, victim: Request) -> None:
        """A victim that was already scheduled in this step gives its share of the budget back."""
        if victim in self.requests:
            self.requests.remove(victim)
            self.token_budget += self.num_tokens.pop(victim.request_id)
            del self.new_blocks[victim.request_id]
        self.preempted.append(victim)

    def clamp_chunk(self, num_tokens: int) -> int:
        return min(num_tokens, self.chunk_limit) if self.chunk_limit else num_tokens
