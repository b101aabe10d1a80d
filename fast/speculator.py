"""Who guesses the next tokens. Twin: `reference/speculator.py`.

What differs:

- The n-gram search compares the whole sequence with its last token in one pass, and then only the places where that
  token stands, token by token backwards: the longest match is the last one before none is left.
- The draft model's requests go on as deltas from draft to draft and from call to call; one is set up anew only when a
  draft was rejected. What a request has in common with its drafts is found by comparing the drafts alone.

The draft model runs in a `ModelRunner`, and so with its persistent batch, its kernels and its batched sampler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fast.block_pool import BlockPool
from fast.model_runner import ModelRunner
from reference.contracts.config import CacheConfig, EngineConfig, SpeculativeConfig, cdiv
from reference.contracts.protocols import Checkpoint
from reference.contracts.schedule import NewRequestData, RunningRequestData, SchedulerOutput
from reference.contracts.speculation import DraftRequest, Speculator


def make_speculator(config: EngineConfig, draft_checkpoint: Checkpoint | None) -> Speculator | None:
    """The proposer that the config asks for, or None.

    Raises:
        ValueError: the draft model's architecture is not supported, or its checkpoint does not fit it.
    """
    if config.speculative is None:
        return None
    if config.speculative.method == "ngram":
        return NgramProposer(config.speculative)
    assert draft_checkpoint is not None, "whoever asks for a draft model loads its weights"
    return DraftModelProposer(config, draft_checkpoint)


class NgramProposer:
    """Guesses that the sequence goes on as it did before: what followed the earliest occurrence of its longest tail."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.min_n, self.max_n = config.prompt_lookup_min, config.prompt_lookup_max

    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, list[int]]:
        """See `Speculator`. A request whose tail occurs once has no entry."""
        drafts = {request.request_id: self._propose(request) for request in requests}
        return {request_id: token_ids for request_id, token_ids in drafts.items() if token_ids}

    def _propose(self, request: DraftRequest) -> list[int]:
        token_ids = np.asarray(request.token_ids)  # [L]
        found: int | None = None
        ends = (
            np.flatnonzero(token_ids[:-1] == token_ids[-1]) + 1
        )  # behind each earlier occurrence of the last n
        for n in range(1, self.max_n + 1):
            if n > 1:
                ends = ends[ends >= n]
                ends = ends[token_ids[ends - n] == token_ids[-n]] if len(ends) else ends
            if not len(ends):
                break
            if n >= self.min_n:
                found = int(ends[0])
        if found is None:
            return []
        drafts: list[int] = token_ids[found : found + request.max_num_drafts].tolist()
        return drafts

    def forget(self, request_ids: Iterable[str]) -> None:
        """It remembers nothing."""


@dataclass
class _DraftState:
    """How far the draft model is with one request.

    The runner knows `num_tokens` tokens of it: the sequence as it was at the last call, and behind it `drafts`.
    """

    num_tokens: int = 0
    num_computed_tokens: int = 0
    drafts: list[int] = field(default_factory=list)
    is_admitted: bool = False  # the runner has it, and what it knows is still right
    block_ids: list[int] = field(default_factory=list)
    unsent_token_ids: tuple[int, ...] = ()  # what the next delta must say
    unsent_block_ids: list[int] = field(default_factory=list)

    def follow(self, token_ids: np.ndarray) -> None:
        """The sequence is [L] tokens long by now; some of the drafts may stand in it."""
        start = self.num_tokens - len(self.drafts)
        num_kept = start
        for draft, token_id in zip(self.drafts, token_ids[start:].tolist(), strict=False):
            if draft != token_id:
                break
            num_kept += 1
        # Of an admitted request tokens can only be added.
        self.is_admitted = self.is_admitted and num_kept == self.num_tokens
        self.num_computed_tokens = min(self.num_computed_tokens, num_kept, len(token_ids) - 1)
        if self.is_admitted:
            self.unsent_token_ids = tuple(token_ids[num_kept:].tolist())
        self.num_tokens = len(token_ids)
        self.drafts = []

    def append(self, draft: int) -> None:
        self.drafts.append(draft)
        self.unsent_token_ids = (draft,)
        self.num_tokens += 1


class DraftModelProposer:
    """Guesses with a smaller model of the same vocabulary, which has a KV cache and a block pool of its own.

    Args:
        config: of the engine; `speculative.draft_model` and `num_draft_blocks` size the draft model.
        checkpoint: the draft model's weights.

    Raises:
        ValueError: the architecture is not supported, or the checkpoint does not fit it.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        speculative = config.speculative
        assert speculative is not None
        assert speculative.draft_model is not None
        self.block_size = config.cache.block_size
        self.max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        self.max_length = speculative.draft_model.max_position_embeddings
        self.block_pool = BlockPool(speculative.num_draft_blocks)
        cache = CacheConfig(self.block_size, speculative.num_draft_blocks, enable_prefix_caching=False)
        draft_config = replace(
            config, model=speculative.draft_model, cache=cache, speculative=None, keep_logits=False
        )
        self.model_runner = ModelRunner(draft_config, checkpoint)
        self._states: dict[str, _DraftState] = {}
        self._forgotten: list[str] = []  # the runner hears of them with the next schedule

    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, list[int]]:
        """See `Speculator`. No drafts for a request that outgrew the model's positions or the room in its pool."""
        active = [request for request in requests if self._make_room(request)]
        drafts: dict[str, list[int]] = {request.request_id: [] for request in active}
        for request in active:
            self._states[request.request_id].follow(np.asarray(request.token_ids))
        self._catch_up(active)
        while active:
            token_ids = self._run(active, self._num_left(active))
            going_on = []
            for request in active:
                token_id = token_ids.get(request.request_id)
                if token_id is None:  # its row gave no token
                    continue
                drafts[request.request_id].append(token_id)
                if len(drafts[request.request_id]) < request.max_num_drafts:
                    self._states[request.request_id].append(token_id)
                    going_on.append(request)
            active = going_on
        return {request_id: token_ids for request_id, token_ids in drafts.items() if token_ids}

    def _make_room(self, request: DraftRequest) -> bool:
        """Blocks for the request and all its drafts but the last, which is not fed back; False if there are too few."""
        num_tokens = len(request.token_ids) + request.max_num_drafts - 1
        if num_tokens > self.max_length:
            return False
        state = self._states.setdefault(request.request_id, _DraftState())
        num_missing = max(cdiv(num_tokens, self.block_size) - len(state.block_ids), 0)
        if num_missing > self.block_pool.get_num_free_blocks():
            return False
        if num_missing:
            blocks = self.block_pool.get_new_blocks(num_missing)
            state.block_ids += blocks
            state.unsent_block_ids += blocks
        return True

    def _num_left(self, requests: Sequence[DraftRequest]) -> dict[str, int]:
        states = [(request.request_id, self._states[request.request_id]) for request in requests]
        return {request_id: state.num_tokens - state.num_computed_tokens for request_id, state in states}

    def _catch_up(self, requests: Sequence[DraftRequest]) -> None:
        """Until what is left fits into one step of the usual size, and every request samples in it."""
        budget = max(self.max_num_batched_tokens, len(requests))
        while sum((left := self._num_left(requests)).values()) > budget:
            chunks: dict[str, int] = {}
            for request_id, num_left in left.items():
                chunks[request_id] = min(num_left - 1, budget - sum(chunks.values()))
            self._run([request for request in requests if chunks[request.request_id]], chunks)

    def _run(self, requests: Sequence[DraftRequest], num_tokens: Mapping[str, int]) -> dict[str, int]:
        """One step of the draft model; the next token of each request that is caught up by it."""
        new, running = [], []
        for request in requests:
            state = self._states[request.request_id]
            if state.is_admitted:
                running.append(self._delta(request.request_id, state))
            else:
                new.append(self._admission(request, state))
            state.num_computed_tokens += num_tokens[request.request_id]
            state.is_admitted, state.unsent_token_ids, state.unsent_block_ids = True, (), []
        forgotten, self._forgotten = tuple(self._forgotten), []
        output = self.model_runner.execute(
            SchedulerOutput(
                step=0,
                scheduled_new_reqs=tuple(new),
                scheduled_running_reqs=tuple(running),
                num_scheduled_tokens={r.request_id: num_tokens[r.request_id] for r in requests},
                preempted_req_ids=tuple(data.request_id for data in new),
                finished_req_ids=forgotten,
            )
        )
        return {request_id: token_ids[0] for request_id, token_ids in output.sampled_token_ids.items()}

    def _delta(self, request_id: str, state: _DraftState) -> RunningRequestData:
        return RunningRequestData(
            request_id, state.unsent_token_ids, tuple(state.unsent_block_ids), state.num_computed_tokens
        )

    def _admission(self, request: DraftRequest, state: _DraftState) -> NewRequestData:
        """As if the K and V that are still right were a prefix-cache hit."""
        return NewRequestData(
            request_id=request.request_id,
            token_ids=tuple(np.asarray(request.token_ids).tolist()),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=state.num_computed_tokens,
            block_ids=tuple(state.block_ids),
            sampling_params=request.sampling_params.for_drafts(),
            seed=request.seed,
        )

    def forget(self, request_ids: Iterable[str]) -> None:
        """Give their blocks back."""
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                self.block_pool.free_blocks(state.block_ids[::-1])
                self._forgotten.append(request_id)
