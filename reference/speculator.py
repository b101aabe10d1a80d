"""Who guesses the next tokens: the sequence itself, searched for its own tail, or a smaller model.

A guess costs little, and the model checks all guesses of a step at once: see `contracts/speculation.py`. What is
guessed decides how many steps a request takes, never what it says. Fast twin: `fast/speculator.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from reference.block_pool import BlockPool
from reference.contracts.config import CacheConfig, EngineConfig, SpeculativeConfig, cdiv
from reference.contracts.protocols import Checkpoint
from reference.contracts.schedule import NewRequestData, SchedulerOutput
from reference.contracts.speculation import DraftRequest, Speculator
from reference.model_runner import ModelRunner


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
    """Guesses that the sequence goes on as it did before.

    Its last n tokens are searched for in it, the longest n first; what followed their earliest occurrence is the guess.
    Good for text that repeats its prompt: summaries, edits, code. (vLLM: `v1/spec_decode/ngram_proposer.py`; idea:
    Saxena, "Prompt Lookup Decoding", 2023.)
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.min_n, self.max_n = config.prompt_lookup_min, config.prompt_lookup_max

    def propose(self, requests: Sequence[DraftRequest]) -> dict[str, list[int]]:
        """See `Speculator`. A request whose tail occurs once has no entry."""
        drafts = {request.request_id: self._propose(request) for request in requests}
        return {request_id: token_ids for request_id, token_ids in drafts.items() if token_ids}

    def _propose(self, request: DraftRequest) -> list[int]:
        token_ids = list(request.token_ids)
        for n in range(self.max_n, self.min_n - 1, -1):
            tail = token_ids[-n:]
            for end in range(n, len(token_ids)):  # where an occurrence ends; the tail itself is none
                if token_ids[end - n : end] == tail:
                    return token_ids[end : end + request.max_num_drafts]
        return []

    def forget(self, request_ids: Iterable[str]) -> None:
        """It remembers nothing."""


@dataclass
class _DraftState:
    """How far the draft model is with one request."""

    block_ids: list[int]  # its block table in the draft model's own pool
    computed_token_ids: list[int]  # tokens whose K and V these blocks hold: the sequence, then drafts


class DraftModelProposer:
    """Guesses with a smaller model of the same vocabulary, which has a KV cache and a block pool of its own.

    The model runs in a `ModelRunner` that is driven with schedules made here. Every call admits its requests anew, as
    if the K and V that are still right were a prefix-cache hit: what the model has not seen yet is caught up with, and
    drafts that were rejected are forgotten, by the same number. Each draft is drawn with the request's parameters and
    the noise of its position, so the two models agree where their logits do.

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
        self._catch_up(active)
        while active:
            token_ids = self._run(active, drafts)
            for request_id, token_id in token_ids.items():
                drafts[request_id].append(token_id)
            # A request whose row gave no token stays as short as it is.
            active = [
                request
                for request in active
                if request.request_id in token_ids
                and len(drafts[request.request_id]) < request.max_num_drafts
            ]
        return {request_id: token_ids for request_id, token_ids in drafts.items() if token_ids}

    def _make_room(self, request: DraftRequest) -> bool:
        """Blocks for the request and all its drafts but the last, which is not fed back; False if there are too few."""
        num_tokens = len(request.token_ids) + request.max_num_drafts - 1
        if num_tokens > self.max_length:
            return False
        state = self._states.setdefault(request.request_id, _DraftState([], []))
        num_missing = max(cdiv(num_tokens, self.block_size) - len(state.block_ids), 0)
        if num_missing > self.block_pool.get_num_free_blocks():
            return False
        state.block_ids += self.block_pool.get_new_blocks(num_missing)
        return True

    def _catch_up(self, requests: Sequence[DraftRequest]) -> None:
        """Until what is left fits into one step of the usual size, and every request samples in it."""
        while True:
            left = {r.request_id: len(r.token_ids) - self._num_computed(r, []) for r in requests}
            budget = max(self.max_num_batched_tokens, len(requests))
            if sum(left.values()) <= budget:
                return
            chunks: dict[str, int] = {}
            for request_id, num_left in left.items():
                chunks[request_id] = min(num_left - 1, budget - sum(chunks.values()))
            self._run([request for request in requests if chunks[request.request_id]], {}, chunks)

    def _run(
        self,
        requests: Sequence[DraftRequest],
        drafts: dict[str, list[int]],
        chunks: dict[str, int] | None = None,
    ) -> dict[str, int]:
        """One step of the draft model behind these drafts; the next token of each request that is not in a chunk."""
        admitted, num_scheduled = [], {}
        for request in requests:
            request_id, state = request.request_id, self._states[request.request_id]
            token_ids = [*request.token_ids, *drafts.get(request_id, ())]
            start = self._num_computed(request, drafts.get(request_id, ()))
            num_scheduled[request_id] = chunks[request_id] if chunks else len(token_ids) - start
            state.computed_token_ids = token_ids[: start + num_scheduled[request_id]]
            admitted.append(
                NewRequestData(
                    request_id=request_id,
                    token_ids=tuple(token_ids),
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_computed_tokens=start,
                    block_ids=tuple(state.block_ids),
                    sampling_params=request.sampling_params.for_drafts(),
                    seed=request.seed,
                )
            )
        forgotten, self._forgotten = tuple(self._forgotten), []
        output = self.model_runner.execute(
            SchedulerOutput(
                step=0,
                scheduled_new_reqs=tuple(admitted),
                scheduled_running_reqs=(),
                num_scheduled_tokens=num_scheduled,
                preempted_req_ids=tuple(num_scheduled),
                finished_req_ids=forgotten,
            )
        )
        return {request_id: token_ids[0] for request_id, token_ids in output.sampled_token_ids.items()}

    def _num_computed(self, request: DraftRequest, drafts: Sequence[int]) -> int:
        """Tokens whose K and V are there and right; the last one is always computed, to draw what follows it."""
        computed = self._states[request.request_id].computed_token_ids
        num_same = 0
        for old, new in zip(computed, [*request.token_ids, *drafts], strict=False):
            if old != new:
                break
            num_same += 1
        return min(num_same, len(request.token_ids) + len(drafts) - 1)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Give their blocks back."""
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                self.block_pool.free_blocks(state.block_ids[::-1])
                self._forgotten.append(request_id)
