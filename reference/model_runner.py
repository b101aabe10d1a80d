"""From a schedule to tokens: flatten the scheduled tokens of all requests into one batch, run the model, sample.

The batch is rebuilt from nothing in every step, so that each of its arrays can be read beside its definition. Requests
stand one after the other in scheduling order:

    request r computes positions [c, c + n), where c = num_computed_tokens and n = num_scheduled_tokens[r]
    it samples when c + n reaches its last known token; otherwise this was one chunk of a prefill

Fast twin: `fast/model_runner.py`, which keeps the batch between steps. Source: vLLM's `v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from reference.attention import AttentionMetadata
from reference.contracts.config import EngineConfig
from reference.contracts.logits import PROMPT_ROWS, top_logprobs, top_prompt_logprobs
from reference.contracts.protocols import Checkpoint
from reference.contracts.request import child_request_id, child_seed
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import (
    NAN_LOGITS,
    NO_TOKEN,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprob,
)
from reference.models import get_model_class
from reference.sampler import NO_TOKEN_LEFT, ProcessedRow, Sampler, SamplingMetadata


@dataclass
class _RequestState:
    """The runner's own copy of a request: all that it needs to build the batch without asking the scheduler."""

    token_ids: list[int]  # prompt and output
    block_ids: list[int]  # the block table
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling_params: SamplingParams
    seed: int
    prompt_embeds: np.ndarray | None  # float32 [P, C], in place of the prompt's tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """None, if the prompt came as vectors: its ids only hold the places."""
        return self.token_ids[: self.num_prompt_tokens] if self.prompt_embeds is None else []


@dataclass(frozen=True)
class _Batch:
    """One step's input. Rows of one request are contiguous; see `AttentionMetadata` for who is who."""

    input_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    attention: AttentionMetadata
    sampling_req_ids: list[str]  # R requests that reach their last known token
    logits_rows: np.ndarray  # int64 [R], the row of that token


class ModelRunner:
    """Holds the weights, the KV cache, and a copy of every scheduled request's tokens and block table.

    Args:
        config: sizes of model, cache and batch.
        checkpoint: the weights.

    Raises:
        ValueError: the architecture is not supported, or the checkpoint does not fit it.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        model, cache = config.model, config.cache
        self.block_size = cache.block_size
        self.keep_logits = config.keep_logits
        self.model = get_model_class(model.architecture)(model, checkpoint)
        self.sampler = Sampler()
        # [N, B, Hkv, D]
        shape = (cache.num_blocks, cache.block_size, model.num_key_value_heads, model.head_dim)
        # A page of zeros gets memory from the operating system when it is first written: unused blocks cost nothing.
        self.kv_caches = [
            (np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32))
            for _ in range(model.num_hidden_layers)
        ]
        self._states: dict[str, _RequestState] = {}

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens' K and V, and the next token of each request that has caught up."""
        self._update_states(schedule)
        if not schedule.num_scheduled_tokens:
            return ModelRunnerOutput(sampled_token_ids={})
        self._copy_blocks(schedule)
        batch = self._prepare_inputs(schedule)
        embeds = self._inputs_embeds(schedule, batch)
        # hidden is [T, C]
        hidden = self.model.forward(batch.input_ids, batch.positions, self.kv_caches, batch.attention, embeds)
        logits = self.model.compute_logits(hidden[batch.logits_rows])  # [R, V]
        draws = self._draws(batch.sampling_req_ids)
        rows = [row for row, _ in draws]
        token_ids = self.sampler(logits[rows], self._sampling_metadata(batch.sampling_req_ids, draws))
        prompt_logprobs, errors = self._prompt_logprobs(schedule, batch, hidden)
        output = self._make_output(batch.sampling_req_ids, draws, token_ids, logits)
        return replace(output, errors=output.errors | errors, prompt_logprobs=prompt_logprobs)

    def _draws(self, request_ids: list[str]) -> list[tuple[int, int]]:
        """(row of logits, index of the sequence) of each token to draw.

        One a request; but when a prompt with n > 1 is complete, its one row of logits gives all n sequences their first
        token.
        """
        draws = []
        for row, request_id in enumerate(request_ids):
            state = self._states[request_id]
            num_sequences = state.sampling_params.n if state.num_output_tokens == 0 else 1
            draws += [(row, index) for index in range(num_sequences)]
        return draws

    def _copy_blocks(self, schedule: SchedulerOutput) -> None:
        """Copy-on-write: one after the other, in every layer, before anything is written."""
        for copy in schedule.block_copies:
            for k_cache, v_cache in self.kv_caches:
                k_cache[copy.target] = k_cache[copy.source]  # [B, Hkv, D]
                v_cache[copy.target] = v_cache[copy.source]  # [B, Hkv, D]

    def _update_states(self, schedule: SchedulerOutput) -> None:
        """Forget first: a request that was preempted earlier, or an id that is used again, comes back as new."""
        for request_id in (*schedule.finished_req_ids, *schedule.preempted_req_ids):
            self._states.pop(request_id, None)
        for new in schedule.scheduled_new_reqs:
            self._states[new.request_id] = _RequestState(
                token_ids=list(new.token_ids),
                block_ids=list(new.block_ids),
                num_prompt_tokens=new.num_prompt_tokens,
                num_computed_tokens=new.num_computed_tokens,
                sampling_params=new.sampling_params,
                seed=new.seed,
                prompt_embeds=new.prompt_embeds,
            )
        for running in schedule.scheduled_running_reqs:
            state = self._states[running.request_id]
            state.token_ids.extend(running.new_token_ids)
            if running.block_copy is not None:
                state.block_ids[running.block_copy.index] = running.block_copy.target
            state.block_ids.extend(running.new_block_ids)
            state.num_computed_tokens = running.num_computed_tokens

    def _prepare_inputs(self, schedule: SchedulerOutput) -> _Batch:
        """Lay the requests' scheduled tokens side by side, in scheduling order."""
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start_loc = [0]
        seq_lens: list[int] = []
        sampling_req_ids: list[str] = []
        logits_rows: list[int] = []
        for request_id, num_scheduled in schedule.num_scheduled_tokens.items():
            state = self._states[request_id]
            start, end = state.num_computed_tokens, state.num_computed_tokens + num_scheduled
            input_ids += state.token_ids[start:end]
            positions += range(start, end)
            slots += [self._slot(state.block_ids, position) for position in range(start, end)]
            query_start_loc.append(len(input_ids))
            seq_lens.append(end)
            if end == len(state.token_ids):
                sampling_req_ids.append(request_id)
                logits_rows.append(len(input_ids) - 1)

        return _Batch(
            input_ids=np.array(input_ids, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            attention=AttentionMetadata(
                query_start_loc=np.array(query_start_loc, dtype=np.int32),
                seq_lens=np.array(seq_lens, dtype=np.int32),
                block_tables=self._block_tables(list(schedule.num_scheduled_tokens)),
                slot_mapping=np.array(slots, dtype=np.int64),
            ),
            sampling_req_ids=sampling_req_ids,
            logits_rows=np.array(logits_rows, dtype=np.int64),
        )

    def _inputs_embeds(self, schedule: SchedulerOutput, batch: _Batch) -> np.ndarray | None:
        """[T, C]: given vectors at the positions of such prompts, and everywhere else the embedding of the token.

        None when every token of the step is one.
        """
        embeds = None
        for s, request_id in enumerate(schedule.num_scheduled_tokens):
            state = self._states[request_id]
            if state.prompt_embeds is None or state.num_computed_tokens >= state.num_prompt_tokens:
                continue
            if embeds is None:
                embeds = self.model.embed_input_ids(batch.input_ids)  # [T, C]
            first, last = batch.attention.query_start_loc[s : s + 2]
            given = state.prompt_embeds[state.num_computed_tokens :][: last - first]  # [rows, C]
            embeds[first : first + len(given)] = given
        return embeds

    def _prompt_logprobs(
        self, schedule: SchedulerOutput, batch: _Batch, hidden: np.ndarray
    ) -> tuple[dict[str, PromptLogprobs], dict[str, str]]:
        """Of each prompt that asked for them, as far as this step has come; and those with a NaN, which are errors.

        The row of position p scores the token at p + 1, and the row of the last one scores no token of the prompt. Once
        there is output the prompt was scored before, and it is only computed again.
        """
        scored: dict[str, PromptLogprobs] = {}
        errors: dict[str, str] = {}
        for s, request_id in enumerate(schedule.num_scheduled_tokens):
            state = self._states[request_id]
            num_logprobs = state.sampling_params.prompt_logprobs
            if num_logprobs is None or state.num_output_tokens:
                continue
            first, last = batch.attention.query_start_loc[s : s + 2]
            start = state.num_computed_tokens + 1
            token_ids = state.token_ids[start : start + last - first]
            rows = hidden[first : first + len(token_ids)]  # [rows, C]
            parts = np.split(rows, range(PROMPT_ROWS, len(rows), PROMPT_ROWS))
            found = top_prompt_logprobs(map(self.model.compute_logits, parts), start, token_ids, num_logprobs)
            if found is None:
                errors[request_id] = NAN_LOGITS
            elif token_ids:
                scored[request_id] = found
        return scored, errors

    def _slot(self, block_ids: list[int], position: int) -> int:
        """Where the K and V of a position live: logical block -> physical block -> slot."""
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _block_tables(self, request_ids: list[str]) -> np.ndarray:
        """Block tables of unequal length as one array, padded with the null block: int32 [S, max_blocks]."""
        tables = [self._states[request_id].block_ids for request_id in request_ids]
        padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        for s, table in enumerate(tables):
            padded[s, : len(table)] = table
        return padded

    def _sampling_metadata(self, request_ids: list[str], draws: list[tuple[int, int]]) -> SamplingMetadata:
        states = [self._states[request_ids[row]] for row, _ in draws]
        params = [state.sampling_params for state in states]
        seeds = [child_seed(state.seed, index) for state, (_, index) in zip(states, draws, strict=True)]
        return SamplingMetadata(
            temperature=np.array([p.temperature for p in params], dtype=np.float64),
            top_k=np.array([p.top_k for p in params], dtype=np.int32),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            min_p=np.array([p.min_p for p in params], dtype=np.float64),
            seeds=np.array(seeds, dtype=np.uint64),
            output_positions=np.array([state.num_output_tokens for state in states], dtype=np.int64),
            processed_rows={
                r: ProcessedRow(
                    state.sampling_params,
                    prompt_token_ids=state.prompt_token_ids,
                    output_token_ids=state.token_ids[state.num_prompt_tokens :],
                )
                for r, state in enumerate(states)
                if state.sampling_params.changes_logits
            },
        )

    def _make_output(
        self, request_ids: list[str], draws: list[tuple[int, int]], token_ids: list[int], logits: np.ndarray
    ) -> ModelRunnerOutput:
        sampled: dict[str, list[int]] = {}
        siblings: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        logprobs: dict[str, list[tuple[TokenLogprob, ...]]] = {}
        for (row, index), token_id in zip(draws, token_ids, strict=True):
            request_id = request_ids[row]
            num_logprobs = self._states[request_id].sampling_params.logprobs
            if num_logprobs is not None and token_id >= 0:
                top = top_logprobs(logits[row], token_id, num_logprobs)
                logprobs[child_request_id(request_id, index)] = [top]
            if token_id < 0:
                errors[request_id] = NO_TOKEN if token_id == NO_TOKEN_LEFT else NAN_LOGITS
            elif index == 0:
                sampled[request_id] = [token_id]
            else:
                siblings.setdefault(request_id, []).append(token_id)
        rows = {r: logits[i] for i, r in enumerate(request_ids) if r in sampled} if self.keep_logits else None
        return ModelRunnerOutput(sampled, errors, siblings, rows, logprobs)
