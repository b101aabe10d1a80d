"""One `StepTrace` a step: what the engine decided, why, and what the cache looked like when it had decided.

It is the single source for comparing the tiers step by step and for showing a run. A snapshot is taken after
`schedule()` and before the forward pass: tables already hold the blocks of this step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress, count
from operator import is_not
from typing import Literal

from reference.contracts.request import Request, RequestStatus

TokenKind = Literal["prefill", "decode"]


@dataclass(frozen=True)
class CacheSnapshot:
    """State of block pool and block tables."""

    block_tables: dict[str, tuple[int, ...]]  # request id -> physical blocks, in logical order
    ref_counts: dict[int, int]  # blocks with at least one holder
    free_order: tuple[int, ...]  # the head is handed out next
    hashes: dict[int, str]  # hex hash of every block that the prefix cache can find
    evicted: tuple[int, ...]  # blocks that lost a hash in this step because they were handed out anew
    host_tables: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # of the swapped: blocks of the host pool

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_order)


class HexHashes:
    """The hashes of a pool in hex, from one snapshot to the next.

    A step changes a few blocks of thousands. Only those are written out again; the snapshots share the strings of the
    others, and the whole table while nothing changes. So a table that was handed out is never changed.
    """

    def __init__(self, num_blocks: int) -> None:
        self._seen: list[bytes | None] = [None] * num_blocks
        self._hex: list[str | None] = [None] * num_blocks
        self._table: dict[int, str] = {}

    def update(self, block_hash: list[bytes | None]) -> dict[int, str]:
        """Block -> hex hash of every block that has one, in ascending order. `block_hash` is by block."""
        changed = list(compress(count(), map(is_not, block_hash, self._seen)))
        if changed:
            for block in changed:
                key = block_hash[block]
                self._hex[block] = None if key is None else key.hex()
            self._seen = block_hash.copy()
            self._table = {block: text for block, text in enumerate(self._hex) if text is not None}
        return self._table


@dataclass(frozen=True)
class SchedulerSnapshot:
    """State of the queues, in order, with the cache."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    swapped: tuple[str, ...]
    num_tokens: dict[str, int]  # of the running: the tokens that are known, prompt and output
    num_computed_tokens: dict[str, int]  # of the running, already advanced by this step
    cache: CacheSnapshot

    @classmethod
    def of(
        cls,
        running: Iterable[Request],
        waiting: Iterable[Request],
        swapped: Iterable[Request],
        cache: CacheSnapshot,
    ) -> SchedulerSnapshot:
        running = tuple(running)
        return cls(
            running=tuple(request.request_id for request in running),
            waiting=tuple(request.request_id for request in waiting),
            swapped=tuple(request.request_id for request in swapped),
            num_tokens={request.request_id: request.num_tokens for request in running},
            num_computed_tokens={request.request_id: request.num_computed_tokens for request in running},
            cache=cache,
        )


@dataclass(frozen=True)
class SchedulerNotes:
    """Why the scheduler preempted and turned away whom it did in one step, in words.

    A tracing engine hands the scheduler an empty one before each step. The scheduler calls these methods where it
    decides, with the numbers it decided by, so that a reason can never differ from the deed.
    """

    preempted: dict[str, str] = field(default_factory=dict)  # request id -> sentence, in order of preemption
    refused: dict[str, str] = field(default_factory=dict)  # the request at which admission ended -> sentence

    def preempt(
        self,
        victim: Request,
        request: Request,
        shortage: tuple[int, int],
        running: Iterable[Request],
        by_priority: bool,
    ) -> None:
        """`victim` gives way to `request`, which may be itself. `shortage` is the cache manager's."""
        needed, free = shortage
        if not by_priority:
            rank = "arrived last"
        elif any(other is not victim and other.priority == victim.priority for other in running):
            rank = "arrived last of the lowest priority"
        else:
            rank = "has the lowest priority"
        self.preempted[victim.request_id] = (
            f"preempted {victim.request_id}: {request.request_id} needed {_blocks(needed)}, {free} free, "
            f"{victim.request_id} {rank}"
        )

    def swap(self, victim: Request, host_shortage: tuple[int, int]) -> None:
        """What became of the K and V of a victim, in preemption mode `swap`. `host_shortage` is the cache manager's."""
        needed, free = host_shortage
        if victim.status is RequestStatus.SWAPPED:
            fate = f"{_blocks(needed)} swapped out"
        else:
            fate = f"to be computed again, the host pool has {free} of {_blocks(needed)}"
        self.preempted[victim.request_id] += f"; {fate}"

    def refuse_partial_prefill(self, request: Request, max_num_partial_prefills: int) -> None:
        self._refuse(request, f"max_num_partial_prefills is {max_num_partial_prefills}")

    def refuse_for_blocks(self, request: Request, shortage: tuple[int, int]) -> None:
        needed, free = shortage
        self._refuse(request, f"needs {_blocks(needed)}, {free} free")

    def refuse_whole_prompt(self, request: Request, num_tokens: int, token_budget: int) -> None:
        what = "prompt" if num_tokens == request.num_prompt_tokens else "remainder"
        self._refuse(
            request,
            f"{what} of {num_tokens} tokens exceeds the remaining budget of {token_budget} and chunked prefill is off",
        )

    def refuse_all(self, request: Request, token_budget: int, max_num_seqs: int) -> None:
        """`request` is the first that admission did not even look at."""
        spent = "the step's token budget is spent"
        self._refuse(request, f"max_num_seqs is {max_num_seqs}" if token_budget > 0 else spent)

    def refuse_after_preemption(self, request: Request) -> None:
        self._refuse(request, "nobody is admitted in a step that preempts")

    def _refuse(self, request: Request, reason: str) -> None:
        self.refused[request.request_id] = f"{request.request_id} waits: {reason}"


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"


@dataclass(frozen=True)
class StepTrace:
    """One step of the engine."""

    step: int
    token_budget: int  # tokens the step might have computed: max_num_batched_tokens
    num_scheduled_tokens: dict[str, int]  # in scheduling order
    kinds: dict[str, TokenKind]  # of those tokens: see `token_kind`
    num_cached_tokens: dict[str, int]  # prefix-cache hits of the requests admitted in this step
    preempted: tuple[str, ...]
    preemption_reasons: dict[str, str]  # a sentence for each of them
    block_copies: tuple[tuple[int, int, int], ...]  # copies-on-write: (index in the table, source, target)
    swap_outs: tuple[tuple[int, int], ...]  # (block of the KV cache, block of the host pool)
    swap_ins: tuple[tuple[int, int], ...]
    draft_token_ids: dict[str, tuple[int, ...]]  # drafts that this step checked
    refusal_reasons: dict[str, str]  # a sentence for the request at which admission ended
    state: SchedulerSnapshot
    sampled_token_ids: dict[str, tuple[int, ...]]
    # Request id -> finish reason. Those that were aborted before the next step are added: to the engine core that is
    # also the end of a request in whose text a stop string was found.
    finished: dict[str, str]
    started: float  # seconds since the engine was made; this and `seconds` may differ between two equal runs
    seconds: float  # wall time of the step

    @property
    def budget_used(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def budget_unused(self) -> int:
        return self.token_budget - self.budget_used


def token_kind(request: Request, num_scheduled_tokens: int) -> TokenKind:
    """Kind of the tokens that were just scheduled: `num_computed_tokens` is already advanced by them.

    `decode` computes the newest output token, with its drafts, and nothing else; all that catches up, be it with a
    prompt or with the output of a request that was preempted, is `prefill`. The scheduler does not know the difference.
    """
    start = request.num_computed_tokens - num_scheduled_tokens
    num_known = request.num_tokens + max(
        request.num_output_placeholders - 1, 0
    )  # the last one is this step's
    is_decode = start >= request.num_prompt_tokens and start + 1 == num_known
    return "decode" if is_decode else "prefill"
