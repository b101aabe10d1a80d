"""The records that travel between scheduler, model runner and front end in one step.

`SchedulerOutput` is all that the model runner sees: it never reads the scheduler's state. Running requests arrive as
deltas, so a step of 256 decodes moves 256 small records and not 256 prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from reference.contracts.request import Request
from reference.contracts.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np


# Why a request ends with an error when its row of logits gives no token.
NAN_LOGITS = "The model produced logits that are not a number (NaN); check the weights of this model."
NO_TOKEN = "structured_outputs, allowed_token_ids, bad_words and min_tokens left no token; allow more tokens."


# Among a running request's new tokens: the one that the runner itself has drawn in the step before.
PLACEHOLDER_TOKEN_ID = -1


class TokenLogprob(NamedTuple):
    """A token at one position: its log-probability by the raw logits, and its rank, 1 for the most probable."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class BlockCopy:
    """A copy-on-write: `target` takes the place of `source` at `index` of a block table."""

    index: int
    source: int
    target: int


@dataclass(frozen=True)
class BlockSwap:
    """The content of one block on its way between the KV cache and the host pool."""

    device: int  # block of the KV cache
    host: int  # block of the host pool


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of the prompt's tokens from position `start` on, as far as one step computed them.

    Entry i is of the token at `start + i`: this token first, then the most probable ones. Position 0 has none: nothing
    stands before it.
    """

    start: int
    entries: tuple[tuple[TokenLogprob, ...], ...]


@dataclass(frozen=True)
class NewRequestData:
    """A request the runner has no state of: admitted for the first time, resumed after a preemption, or forked."""

    request_id: str
    token_ids: tuple[int, ...]  # prompt and, after a preemption, the output so far
    num_prompt_tokens: int
    num_computed_tokens: int  # KV already in the cache: the prefix-cache hit, and what is swapped in
    block_ids: tuple[int, ...]  # the whole block table
    sampling_params: SamplingParams
    seed: int
    is_forked: bool = (
        False  # a sibling in its first step: its computed tokens are its parent's, and no cache hit
    )
    num_cached_tokens: int = 0  # of the computed tokens, those found in the prefix cache at this admission
    prompt_embeds: np.ndarray | None = field(default=None, compare=False)  # see `EngineCoreRequest`

    @classmethod
    def from_request(
        cls, request: Request, block_ids: tuple[int, ...], num_cached_tokens: int = 0
    ) -> NewRequestData:
        return cls(
            request_id=request.request_id,
            token_ids=tuple(request.all_token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=block_ids,
            sampling_params=request.sampling_params,
            seed=request.seed,
            is_forked=request.is_forked,
            num_cached_tokens=num_cached_tokens,
            prompt_embeds=request.prompt_embeds,
        )


@dataclass(frozen=True)
class RunningRequestData:
    """What changed since the request was last scheduled."""

    request_id: str
    new_token_ids: tuple[
        int, ...
    ]  # sampled since then; or one placeholder, while that step is still in flight
    new_block_ids: tuple[int, ...]  # to be appended to the block table
    num_computed_tokens: int
    block_copy: BlockCopy | None = None  # its target replaces a block of the table

    def known_token_ids(self, newest: Mapping[str, Sequence[int]]) -> Sequence[int]:
        """The new tokens, with what the runner has drawn in the step before in place of a placeholder.

        Who got none in that step has ended with an error: any token will do.
        """
        is_placeholder = self.new_token_ids == (PLACEHOLDER_TOKEN_ID,)
        return newest.get(self.request_id, (0,)) if is_placeholder else self.new_token_ids


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's work.

    Request r computes positions [num_computed_tokens, num_computed_tokens + num_scheduled_tokens[r]); drafts stand
    behind its last known token. Before the forward pass the runner does the swap-outs, the block copies and the
    swap-ins, in this order.
    """

    step: int
    scheduled_new_reqs: tuple[NewRequestData, ...]
    scheduled_running_reqs: tuple[RunningRequestData, ...]
    num_scheduled_tokens: dict[str, int]  # in scheduling order
    preempted_req_ids: tuple[str, ...]  # the runner forgets them; they come back as new
    finished_req_ids: tuple[str, ...]  # finished since the last schedule; the runner forgets them
    block_copies: tuple[BlockCopy, ...] = ()  # to be done in this order
    swap_outs: tuple[BlockSwap, ...] = ()  # of requests that are among the preempted
    swap_ins: tuple[BlockSwap, ...] = ()  # of requests that are among the new
    # Drafts that this step checks, a request that has any (vLLM's name).
    scheduled_spec_decode_tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # What the grammar of a request allows where this step samples: int32 [1 + drafts, cdiv(V, 32)], bit t % 32 of word
    # t // 32 for token t. Row j holds if drafts 0 to j - 1 are accepted.
    grammar_bitmasks: dict[str, np.ndarray] = field(default_factory=dict, compare=False)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True)
class ModelRunnerOutput:
    """What one forward pass produced.

    A request that did not reach its last known token (a prefill chunk) has no entry in `sampled_token_ids`. With drafts
    it has one token more than drafts were accepted.
    """

    sampled_token_ids: dict[str, list[int]]
    # Requests whose logits were not finite: id -> reason.
    errors: dict[str, str] = field(default_factory=dict)
    # When a prompt with n > 1 is complete: first tokens of the sequences 1 to n - 1, from the same row of logits.
    sibling_token_ids: dict[str, list[int]] = field(default_factory=dict)
    # float32 [sampled tokens, V] a sampled request; only with EngineConfig.keep_logits.
    logits: dict[str, np.ndarray] | None = None
    # By sequence, for those that asked: an entry a sampled token, which comes first in it, then the most probable.
    logprobs: dict[str, list[tuple[TokenLogprob, ...]]] = field(default_factory=dict)
    # Of the requests that asked for them and had a part of their prompt computed.
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    # Guesses of the tokens that follow the sampled ones, for the next step.
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineCoreOutput:
    """News of one request after one step, for the output processor."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None  # why, when finish_reason is "error"
    new_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()  # one entry a new token, if they were asked for
    prompt_logprobs: PromptLogprobs | None = None  # may repeat what was reported before a preemption

    @classmethod
    def from_request(
        cls,
        request: Request,
        new_token_ids: Iterable[int],
        error: str | None = None,
        logprobs: Iterable[tuple[TokenLogprob, ...]] = (),
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> EngineCoreOutput:
        """`logprobs` may go on behind the token that ended the request."""
        token_ids = tuple(new_token_ids)
        return cls(
            request_id=request.request_id,
            new_token_ids=token_ids,
            finish_reason=request.status.finish_reason,
            stop_reason=request.stop_reason,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
            error=error,
            new_logprobs=tuple(islice(logprobs, len(token_ids))),
            prompt_logprobs=prompt_logprobs,
        )

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
