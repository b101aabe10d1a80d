"""A request inside the engine core, and the rules that end it.

Token positions of a request split into half-open intervals:

    [0, num_computed_tokens)                      KV is in the cache (or is being written by the running step)
    [num_computed_tokens, num_tokens)             known tokens whose KV is still to be computed
    [num_tokens, num_tokens_with_spec)            drafts: guesses of the next tokens, to be checked by the next step

There is no prefill or decode phase: `num_computed_tokens` chases `num_tokens`, and a token is sampled in the step in
which it catches up (vLLM v1, `vllm/v1/core/sched/scheduler.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from reference.contracts.block_hash import hash_embeds
from reference.contracts.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from reference.contracts.protocols import Grammar


class RequestStatus(Enum):
    """Where a request is in its life. `finish_reason` is `stop`, `length`, `abort`, `error`, or None before the end."""

    WAITING = ("waiting", None)
    RUNNING = ("running", None)
    PREEMPTED = ("preempted", None)  # back in the waiting queue, its blocks were freed
    SWAPPED = ("swapped", None)  # preempted as well, but the content of its blocks is kept in the host pool
    FINISHED_STOPPED = ("finished stopped", "stop")
    FINISHED_LENGTH = ("finished length", "length")
    FINISHED_ABORTED = ("finished aborted", "abort")
    FINISHED_ERROR = ("finished error", "error")

    def __init__(self, label: str, finish_reason: str | None) -> None:
        self.label = label
        self.finish_reason = finish_reason


@dataclass(frozen=True)
class EngineCoreRequest:
    """What the front end hands to the engine core: validated, tokenized, ready to be sent to another process."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    seed: int  # 64-bit, resolved: see contracts.noise.derive_seed
    arrival: tuple[int, int]  # (arrival number, child index)
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0  # smaller runs first
    cache_salt: str | None = None
    # float32 [prompt tokens, hidden size] in place of the prompt's tokens, whose ids are then all 0
    prompt_embeds: np.ndarray | None = field(default=None, compare=False)


@dataclass(eq=False)  # two requests are the same only if they are one object
class Request:
    """Mutable state of one request; owned by the scheduler.

    `all_token_ids` is the prompt followed by the output and is the only copy of either.
    """

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    arrival: tuple[int, int]
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str | None = None
    prompt_embeds: np.ndarray | None = None
    embeds_digest: str | None = None  # of the vectors; all that the prefix cache knows of them
    grammar: Grammar | None = None  # what the output may be, and how far into it the output has come
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # prefix-cache hit of the first admission
    num_preemptions: int = 0
    num_output_placeholders: int = 0  # tokens that the step in flight will give it
    spec_token_ids: list[int] = field(default_factory=list)  # drafts for the next step
    stop_reason: int | None = None
    is_forked: bool = False  # it runs on its parent's blocks and was never admitted by itself
    sort_key: tuple[int, tuple[int, int], str] = field(init=False)  # order under the priority policy

    def __post_init__(self) -> None:
        self.sort_key = (self.priority, self.arrival, self.request_id)
        if self.prompt_embeds is not None and self.embeds_digest is None:
            self.embeds_digest = hash_embeds(self.prompt_embeds)

    @classmethod
    def from_engine_core_request(cls, request: EngineCoreRequest) -> Request:
        return cls(
            request_id=request.request_id,
            all_token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling_params=request.sampling_params,
            seed=request.seed,
            arrival=request.arrival,
            eos_token_ids=request.eos_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            prompt_embeds=request.prompt_embeds,
        )

    def fork(self, index: int) -> Request:
        """Sibling `index` (1 to n - 1) of a request whose prompt is complete: the same prompt, other draws."""
        return Request(
            request_id=child_request_id(self.request_id, index),
            all_token_ids=self.all_token_ids[: self.num_prompt_tokens],
            num_prompt_tokens=self.num_prompt_tokens,
            sampling_params=self.sampling_params,
            seed=child_seed(self.seed, index),
            arrival=(self.arrival[0], index),
            eos_token_ids=self.eos_token_ids,
            priority=self.priority,
            cache_salt=self.cache_salt,
            prompt_embeds=self.prompt_embeds,
            embeds_digest=self.embeds_digest,
            grammar=None if self.grammar is None else self.grammar.fork(),
            num_computed_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            is_forked=True,
        )

    def lose_blocks(self) -> None:
        """Everything is to be computed again."""
        self.num_computed_tokens = 0
        self.leave_running()

    def leave_running(self) -> None:
        """What it is admitted with next is its own, and guesses are made anew."""
        self.is_forked = False
        self.spec_token_ids = []

    def take_drafts(self, token_ids: Sequence[int], max_total_tokens: int) -> None:
        """Drafts for the next step, as far as they can be of use.

        Behind the first draft that the grammar forbids nothing can be accepted.
        """
        limit = num_useful_drafts(
            self.sampling_params, self.num_tokens, self.num_output_tokens, max_total_tokens
        )
        drafts = list(token_ids[:limit])
        self.spec_token_ids = drafts[: self.grammar.count_valid(drafts)] if self.grammar else drafts

    def can_run_ahead(self, max_total_tokens: int) -> bool:
        """Whether its next step can be planned before the token is known that the step in flight will give it.

        Not if that token is the last by length, if siblings begin with it, or if a grammar must see it first.
        """
        num_coming = self.num_output_placeholders
        is_last = self.num_output_tokens + num_coming == self.sampling_params.max_tokens
        is_last = is_last or self.num_tokens + num_coming >= max_total_tokens
        return not (is_last or self.has_unborn_siblings or self.grammar is not None)

    @property
    def has_unborn_siblings(self) -> bool:
        """n > 1, and the prompt is not complete yet: the other sequences exist only as a number."""
        return self.sampling_params.n > 1 and self.arrival[1] == 0 and self.num_output_tokens == 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self.all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status.finish_reason is not None


def child_request_id(request_id: str, index: int) -> str:
    """Id of sequence `index` of a request with n > 1; sequence 0 keeps the request's own id (vLLM's form)."""
    return f"{index}_{request_id}" if index else request_id


def child_seed(seed: int, index: int) -> int:
    return (seed + index) % 2**64


def num_useful_drafts(
    params: SamplingParams, num_tokens: int, num_output_tokens: int, max_total_tokens: int
) -> int:
    """Drafts that a request of this length can make use of, at least 0.

    A step gives one token more than it accepts drafts, and the last token of a sequence is not computed.
    """
    left = max_total_tokens - num_tokens
    if params.max_tokens is not None:
        left = min(left, params.max_tokens - num_output_tokens)
    return max(left - 1, 0)


def append_and_check_stop(request: Request, token_id: int, max_total_tokens: int) -> bool:
    """Append a sampled token; if it ends the request, set the final status and return True.

    Order: end-of-sequence, stop token ids, length. Stop *strings* are found in the front end, which sees text.
    """
    request.all_token_ids.append(token_id)
    if request.grammar is not None:
        request.grammar.accept(token_id)
    params = request.sampling_params
    if token_id in request.eos_token_ids and not params.ignore_eos:
        request.status = RequestStatus.FINISHED_STOPPED
    elif params.is_stop_token(token_id):
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = token_id
    elif request.num_output_tokens == params.max_tokens or request.num_tokens >= max_total_tokens:
        request.status = RequestStatus.FINISHED_LENGTH
    else:
        return False
    return True
