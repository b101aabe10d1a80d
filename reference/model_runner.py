"""From a schedule to tokens: flatten the scheduled tokens of all requests into one batch, run the model, sample.

The batch is rebuilt from nothing in every step, so that each of its arrays can be read beside its definition. Requests
stand one after the other in scheduling order:

    request r computes positions [c, c + n), where c = num_computed_tokens and n = num_scheduled_tokens[r]
    it samples when c + n reaches its last known token; otherwise this was one chunk of a prefill
    drafts stand behind that token: with m of them it samples from 1 + m rows, the j-th as if j drafts were output

Fast twin: `fast/model_runner.py`, which keeps the batch between steps. Source: vLLM's `v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from reference.attention import AttentionMetadata
from reference.block_transfer import BlockTransfer
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
from reference.contracts.speculation import (
    DraftRequest,
    Speculator,
    num_wanted_drafts,
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
    logits_rows: (
        np.ndarray
    )  # int64 [R]: of each request that reaches its last known token, this one and its drafts
    sampled_rows: dict[str, range]  # which of the R are a request's


@dataclass(frozen=True)
class _Draw:
    """A token to be drawn."""

    request_id: str
    row: int  # of the R
    sequence: int  # of a request with n > 1
    drafts: tuple[int, ...]  # taken for output


class ModelRunner:
    """Holds the weights, the KV cache, and a copy of every scheduled request's tokens and block table.

    Args:
        config: sizes of model, cache and batch.
        checkpoint: the weights.
        speculator: who guesses tokens for the next step; None when nobody does.

    Raises:
        ValueError: the architecture is not supported, or the checkpoint does not fit it.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, speculator: Speculator | None = None
    ) -> None:
        model, cache = config.model, config.cache
        self.config = config
        self.speculator = speculator
        self.block_size = cache.block_size
        self.model = get_model_class(model.architecture)(model, checkpoint)
        self.sampler = Sampler()
        # [N, B, Hkv, D]
        shape = (cache.num_blocks, cache.block_size, model.num_key_value_heads, model.head_dim)
        # A page of zeros gets memory from the operating system when it is first written: unused blocks cost nothing.
        self.kv_caches = [
            (np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32))
            for _ in range(model.num_hidden_layers)
        ]
        self.block_transfer = BlockTransfer(self.kv_caches, cache.num_host_blocks)
        self._states: dict[str, _RequestState] = {}

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens' K and V, and the next token of each request that has caught up."""
        self._update_states(schedule)
        self.block_transfer.execute(schedule)  # also in a step that does nothing but preempt
        if not schedule.num_scheduled_tokens:
            return ModelRunnerOutput(sampled_token_ids={})
        batch = self._prepare_inputs(schedule)
        embeds = self._inputs_embeds(schedule, batch)
        # hidden is [T, C]
        hidden = self.model.forward(batch.input_ids, batch.positions, self.kv_caches, batch.attention, embeds)
        logits = self.model.compute_logits(hidden[batch.logits_rows])  # [R, V]
        draws = self._draws(batch.sampled_rows, schedule)
        token_ids = self.sampler(
            logits[[draw.row for draw in draws]], self._sampling_metadata(draws, schedule)
        )
        prompt_logprobs, errors = self._prompt_logprobs(schedule, batch, hidden)
        output = self._make_output(batch.sampled_rows, draws, token_ids, logits)
        return replace(
            output,
            errors=output.errors | errors,
            prompt_logprobs=prompt_logprobs,
            draft_token_ids=self._propose_drafts(output.sampled_token_ids),
        )

    def _draws(self, sampled_rows: dict[str, range], schedule: SchedulerOutput) -> list[_Draw]:
        """One draw a row; but when a prompt with n > 1 is complete, its one row gives all n sequences a first token."""
        draws = []
        for request_id, rows in sampled_rows.items():
            state = self._states[request_id]
            drafts = schedule.scheduled_spec_decode_tokens.get(request_id, ())
            draws += [_Draw(request_id, row, 0, drafts[:j]) for j, row in enumerate(rows)]
            if state.num_output_tokens == 0:
                siblings = range(1, state.sampling_params.n)
                draws += [_Draw(request_id, rows[0], sequence, ()) for sequence in siblings]
        return draws

    def _update_states(self, schedule: SchedulerOutput) -> None:
        """Forget first: a request that was preempted earlier, or an id that is used again, comes back as new."""
        gone = (*schedule.finished_req_ids, *schedule.preempted_req_ids)
        for request_id in gone:
            self._states.pop(request_id, None)
        if self.speculator is not None:
            self.speculator.forget(gone)
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
        logits_rows: list[int] = []
        sampled_rows: dict[str, range] = {}
        for request_id, num_scheduled in schedule.num_scheduled_tokens.items():
            state = self._states[request_id]
            start, end = state.num_computed_tokens, state.num_computed_tokens + num_scheduled
            drafts = schedule.scheduled_spec_decode_tokens.get(request_id, ())
            token_ids = [*state.token_ids, *drafts]
            input_ids += token_ids[start:end]
            positions += range(start, end)
            slots += [self._slot(state.block_ids, position) for position in range(start, end)]
            query_start_loc.append(len(input_ids))
            seq_lens.append(end)
            if end == len(token_ids):
                logits_rows += range(len(input_ids) - 1 - len(drafts), len(input_ids))
                sampled_rows[request_id] = range(len(logits_rows) - 1 - len(drafts), len(logits_rows))

        return _Batch(
            input_ids=np.array(input_ids, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            attention=AttentionMetadata(
                query_start_loc=np.array(query_start_loc, dtype=np.int32),
                seq_lens=np.array(seq_lens, dtype=np.int32),
                block_tables=self._block_tables(list(schedule.num_scheduled_tokens)),
                slot_mapping=np.array(slots, dtype=np.int64),
            ),
            logits_rows=np.array(logits_rows, dtype=np.int64),
            sampled_rows=sampled_rows,
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

    def _sampling_metadata(self, draws: list[_Draw], schedule: SchedulerOutput) -> SamplingMetadata:
        states = [self._states[draw.request_id] for draw in draws]
        params = [state.sampling_params for state in states]
        seeds = [child_seed(state.seed, draw.sequence) for state, draw in zip(states, draws, strict=True)]
        positions = [s.num_output_tokens + len(draw.drafts) for s, draw in zip(states, draws, strict=True)]
        return SamplingMetadata(
            temperature=np.array([p.temperature for p in params], dtype=np.float64),
            top_k=np.array([p.top_k for p in params], dtype=np.int32),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            min_p=np.array([p.min_p for p in params], dtype=np.float64),
            seeds=np.array(seeds, dtype=np.uint64),
            output_positions=np.array(positions, dtype=np.int64),
            processed_rows={
                r: ProcessedRow(
                    state.sampling_params,
                    prompt_token_ids=state.prompt_token_ids,
                    output_token_ids=state.token_ids[state.num_prompt_tokens :],
                ).followed_by(draw.drafts)
                for r, (state, draw) in enumerate(zip(states, draws, strict=True))
                if state.sampling_params.changes_logits
            },
            bitmasks={
                r: schedule.grammar_bitmasks[draw.request_id][len(draw.drafts)]
                for r, draw in enumerate(draws)
                if draw.request_id in schedule.grammar_bitmasks
            },
        )

    def _make_output(
        self, sampled_rows: dict[str, range], draws: list[_Draw], token_ids: list[int], logits: np.ndarray
    ) -> ModelRunnerOutput:
        """A draw counts if the drafts that it takes for output are what was drawn before it."""
        sampled: dict[str, list[int]] = {}
        siblings: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        logprobs: dict[str, list[tuple[TokenLogprob, ...]]] = {}
        for draw, token_id in zip(draws, token_ids, strict=True):
            request_id = draw.request_id
            if draw.sequence == 0 and list(draw.drafts) != sampled.get(request_id, []):
                continue
            if token_id < 0:
                # Behind accepted drafts the run just ends: the next step draws here first, as one without drafts would.
                if not draw.drafts:
                    errors[request_id] = NO_TOKEN if token_id == NO_TOKEN_LEFT else NAN_LOGITS
                continue
            (sampled if draw.sequence == 0 else siblings).setdefault(request_id, []).append(token_id)
            num_logprobs = self._states[request_id].sampling_params.logprobs
            if num_logprobs is not None:
                top = top_logprobs(logits[draw.row], token_id, num_logprobs)
                logprobs.setdefault(child_request_id(request_id, draw.sequence), []).append(top)
        kept = None
        if self.config.keep_logits:  # each [sampled tokens, V]
            kept = {name: logits[sampled_rows[name][: len(ids)]] for name, ids in sampled.items()}
        return ModelRunnerOutput(sampled, errors, siblings, kept, logprobs)

    def _propose_drafts(self, sampled_token_ids: dict[str, list[int]]) -> dict[str, list[int]]:
        """Guesses for the next step of those that just sampled; a schedule brings them, or fewer, back."""
        if self.speculator is None:
            return {}
        requests = []
        for request_id, newest in sampled_token_ids.items():
            state = self._states[request_id]
            params, known = state.sampling_params, state.token_ids + newest
            num_output = len(known) - state.num_prompt_tokens
            wanted = num_wanted_drafts(self.config, params, len(known), num_output, newest)
            if wanted and state.prompt_embeds is None:
                requests.append(
                    DraftRequest(request_id, known, state.num_prompt_tokens, params, state.seed, wanted)
                )
        return self.speculator.propose(requests)
