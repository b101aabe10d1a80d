"""From a schedule to tokens. Twin: `reference/model_runner.py`.

What differs:

- The batch is persistent: a request keeps one row of preallocated arrays from admission to its end, and a
  step applies only what changed. The twin rebuilds everything from lists in every step.
- A step's input is made by array arithmetic (repeat, cumulative sum, one gather): there is no Python loop
  over tokens, and the only loops over requests read the schedule.
- Requests stand in the order of their rows, not of the schedule. When all of them are scheduled, the block
  tables the kernels read are a view of the persistent table.
- A step that samples nothing, such as a lone prefill chunk, skips the head.
- Drafts never enter the persistent rows: they are laid over the step's input, so a rejected one leaves no trace.
- Prompts that are scored and prompts that came as vectors are kept in tables of their own: a step without any does
  not look for them.

Source: vLLM's `v1/worker/gpu_model_runner.py` and `v1/worker/gpu_input_batch.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from fast.attention import AttentionMetadata
from fast.block_transfer import BlockTransfer
from fast.models import get_model_class
from fast.sampler import NO_TOKEN_LEFT, ProcessedRow, Sampler, SamplingMetadata
from reference.contracts.config import EngineConfig, cdiv
from reference.contracts.logits import PROMPT_ROWS, top_logprobs, top_prompt_logprobs
from reference.contracts.protocols import Checkpoint
from reference.contracts.request import child_request_id
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import (
    NAN_LOGITS,
    NO_TOKEN,
    ModelRunnerOutput,
    NewRequestData,
    PromptLogprobs,
    RunningRequestData,
    SchedulerOutput,
    TokenLogprob,
)
from reference.contracts.speculation import DraftRequest, Speculator, num_wanted_drafts


def _ragged_arange(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ranges [starts[i], starts[i] + counts[i]), one after the other: int64 [sum of counts]."""
    ends = np.cumsum(counts)
    ragged: np.ndarray = np.arange(counts.sum()) + np.repeat(starts - ends + counts, counts)
    return ragged


class _RaggedTable:
    """Rows of unequal length in one preallocated array.

    Invariant: row r is values[r, :lengths[r]] and zeros behind it. The operating system provides a page when
    it is first written, so short rows do not pay for the longest one possible.
    """

    def __init__(self, num_rows: int, max_length: int) -> None:
        self.values = np.zeros((num_rows, max_length), dtype=np.int32)  # [rows, max_length]
        self.lengths = np.zeros(num_rows, dtype=np.int64)  # [rows]

    def set_row(self, row: int, values: Sequence[int]) -> None:
        self.values[row, : len(values)] = values
        self.values[row, len(values) : self.lengths[row]] = 0
        self.lengths[row] = len(values)

    def append(self, rows: np.ndarray, parts: Sequence[Sequence[int]]) -> None:
        """Append parts[i] to row rows[i], for all i at once. No row may be named twice."""
        counts = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        columns = _ragged_arange(self.lengths[rows], counts)
        values = np.fromiter(chain.from_iterable(parts), dtype=np.int32, count=len(columns))
        self.values[np.repeat(rows, counts), columns] = values
        self.lengths[rows] += counts

    def move_row(self, source: int, target: int) -> None:
        width = max(self.lengths[source], self.lengths[target])  # the zeros too, where the target was longer
        self.values[target, :width] = self.values[source, :width]
        self.lengths[target] = self.lengths[source]


class _InputBatch:
    """One row a request. Rows [0, num_requests) are in use, without holes and in no meaningful order.

    A running request that a step does not schedule keeps its row. `max_num_seqs` rows suffice: the requests
    with state here are the scheduler's running ones, and those that left them are removed before new ones are
    added.
    """

    def __init__(self, config: EngineConfig) -> None:
        rows, max_model_len = config.scheduler.max_num_seqs, config.scheduler.max_model_len
        self.req_ids: list[str] = []
        self.row_of: dict[str, int] = {}
        self.token_ids = _RaggedTable(rows, max_model_len)
        self.block_tables = _RaggedTable(rows, cdiv(max_model_len, config.cache.block_size))
        self.num_prompt_tokens = np.zeros(rows, dtype=np.int64)
        self.num_computed_tokens = np.zeros(rows, dtype=np.int64)
        self.temperature = np.zeros(rows, dtype=np.float64)
        self.top_k = np.zeros(rows, dtype=np.int32)
        self.top_p = np.zeros(rows, dtype=np.float64)
        self.min_p = np.zeros(rows, dtype=np.float64)
        self.seeds = np.zeros(rows, dtype=np.uint64)
        self.num_sequences = np.zeros(rows, dtype=np.int64)  # n
        self.processed: dict[str, tuple[ProcessedRow, list[int]]] = {}  # few; with the output that it reads
        self.num_logprobs: dict[str, int] = {}  # of those that asked for any
        # Of those that somebody may guess for: a prompt that came as embeddings gives nothing to guess from.
        self.guessable: dict[str, SamplingParams] = {}
        self.num_prompt_logprobs: dict[str, int] = {}  # of those whose prompt is still to be scored
        self.prompt_embeds: dict[str, torch.Tensor] = {}  # float32 [P, C], in place of the prompt's tokens
        self._columns: tuple[np.ndarray, ...] = (
            self.num_prompt_tokens,
            self.num_computed_tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seeds,
            self.num_sequences,
        )

    def add(self, new: NewRequestData) -> None:
        row = len(self.req_ids)
        self.req_ids.append(new.request_id)
        self.row_of[new.request_id] = row
        self.token_ids.set_row(row, new.token_ids)
        self.block_tables.set_row(row, new.block_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.temperature[row] = new.sampling_params.temperature
        self.top_k[row] = new.sampling_params.top_k
        self.top_p[row] = new.sampling_params.top_p
        self.min_p[row] = new.sampling_params.min_p
        self.seeds[row] = new.seed & (2**64 - 1)
        self.num_sequences[row] = new.sampling_params.n
        if new.prompt_embeds is None:
            self.guessable[new.request_id] = new.sampling_params
        if new.sampling_params.logprobs is not None:
            self.num_logprobs[new.request_id] = new.sampling_params.logprobs
        if new.sampling_params.prompt_logprobs is not None and len(new.token_ids) == new.num_prompt_tokens:
            self.num_prompt_logprobs[new.request_id] = new.sampling_params.prompt_logprobs
        if new.prompt_embeds is not None:
            self.prompt_embeds[new.request_id] = torch.from_numpy(new.prompt_embeds)
        if new.sampling_params.changes_logits:
            # The ids of a prompt that came as vectors only hold the places.
            prompt = new.token_ids[: new.num_prompt_tokens] if new.prompt_embeds is None else ()
            output = list(new.token_ids[new.num_prompt_tokens :])
            self.processed[new.request_id] = ProcessedRow(new.sampling_params, prompt, output), output

    def remove(self, request_id: str) -> None:
        """Fill the hole from the last row. Unknown ids are ignored: a request may end before its first step."""
        row = self.row_of.pop(request_id, None)
        if row is None:
            return
        self.processed.pop(request_id, None)
        self.num_logprobs.pop(request_id, None)
        self.guessable.pop(request_id, None)
        self.num_prompt_logprobs.pop(request_id, None)
        self.prompt_embeds.pop(request_id, None)
        last_id = self.req_ids.pop()
        if last_id == request_id:
            return
        last = len(self.req_ids)
        self.req_ids[row] = last_id
        self.row_of[last_id] = row
        self.token_ids.move_row(last, row)
        self.block_tables.move_row(last, row)
        for column in self._columns:
            column[row] = column[last]

    def update(self, running: Sequence[RunningRequestData]) -> None:
        """Apply the deltas of all running requests."""
        rows = np.array([self.row_of[delta.request_id] for delta in running], dtype=np.int64)  # [S]
        self.num_computed_tokens[rows] = [delta.num_computed_tokens for delta in running]
        self.token_ids.append(rows, [delta.new_token_ids for delta in running])
        for i, delta in enumerate(running):
            if delta.block_copy is not None:
                self.block_tables.values[rows[i], delta.block_copy.index] = delta.block_copy.target
        if self.processed:
            for delta in running:
                if delta.request_id in self.processed:
                    self.processed[delta.request_id][1].extend(delta.new_token_ids)
        grown = [i for i, delta in enumerate(running) if delta.new_block_ids]
        if grown:  # a decode takes a new block in one step of B
            self.block_tables.append(rows[grown], [running[i].new_block_ids for i in grown])

    def scheduled(self, num_scheduled_tokens: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
        """Scheduled rows, ascending, and their numbers of tokens: two int64 [S]."""
        counts = np.zeros(len(self.req_ids), dtype=np.int64)  # [num_requests]
        unordered = [self.row_of[request_id] for request_id in num_scheduled_tokens]
        counts[unordered] = list(num_scheduled_tokens.values())
        rows = np.flatnonzero(counts)
        return rows, counts[rows]

    def drafts_of(self, rows: np.ndarray, drafts: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The drafts of each row."""
        return [drafts.get(self.req_ids[row], ()) for row in rows.tolist()] if drafts else [()] * len(rows)

    def block_tables_of(self, rows: np.ndarray) -> np.ndarray:
        """int32 [S, max_blocks], cut to the longest of these ascending rows; a view if they are all rows."""
        max_blocks = self.block_tables.lengths[rows].max()
        if len(rows) == len(self.req_ids):
            return self.block_tables.values[: len(rows), :max_blocks]
        selected: np.ndarray = self.block_tables.values[rows, :max_blocks]
        return selected


@dataclass(frozen=True)
class _StepInput:
    """One step's input. Rows of one request are contiguous; see `AttentionMetadata` for who is who."""

    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int64 [T]
    attention: AttentionMetadata
    request_rows: np.ndarray  # int64 [S], their batch rows, ascending
    sampling_rows: np.ndarray  # int64 [Q], batch rows of the requests that reach their last known token
    num_drafts: np.ndarray  # int64 [Q], tokens behind it
    logits_rows: torch.Tensor  # int64 [R], where that token and its drafts stand among the T, R = Q + drafts


@dataclass(frozen=True)
class _Draws:
    """M tokens to be drawn; those of a request are contiguous.

    A request draws from each of its 1 + drafts rows, the j-th as if j drafts were output; but when a prompt with n > 1
    is complete, its one row gives all n sequences their first token.
    """

    counts: np.ndarray  # int64 [Q], draws a request
    rows: np.ndarray  # int64 [M], of the logits
    requests: np.ndarray  # int64 [M], batch rows
    num_drafts: np.ndarray  # int64 [M], drafts that the draw takes for output
    sequences: np.ndarray  # int64 [M], index among the n sequences of a request
    drafts: Mapping[str, tuple[int, ...]]  # of a request


def _accepted_token_ids(draft_token_ids: Sequence[int], drawn_token_ids: Sequence[int]) -> list[int]:
    """The drafts that were drawn too, and the first token drawn otherwise: draw j holds if j drafts were accepted.

    A row without a token ends the run before it: the next step draws there first, as one without drafts would. The
    result is empty only if the very first row has none.
    """
    num_accepted = 0
    for draft, drawn in zip(draft_token_ids, drawn_token_ids, strict=False):  # one draw more than drafts
        if draft != drawn:
            break
        num_accepted += 1
    is_token = drawn_token_ids[num_accepted] >= 0
    return list(drawn_token_ids[: num_accepted + is_token])


class ModelRunner:
    """Holds the weights, the KV cache, and a copy of every scheduled request's tokens and block table.

    Args:
        config: sizes of model, cache and batch.
        checkpoint: the weights.
        speculator: who guesses tokens for the next step; None when nobody does.

    Raises:
        ValueError: the device or the architecture is not supported, or the checkpoint does not fit the
        architecture.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, speculator: Speculator | None = None
    ) -> None:
        if config.device != "cpu":
            raise ValueError(f"The fast tier runs on the CPU only: pass device='cpu', not {config.device!r}.")
        model, cache = config.model, config.cache
        self.config = config
        self.speculator = speculator
        self.block_size = cache.block_size
        self.model = get_model_class(model.architecture)(model, checkpoint)
        self.sampler = Sampler()
        # [N, B, Hkv, D]
        shape = (cache.num_blocks, cache.block_size, model.num_key_value_heads, model.head_dim)
        # NumPy's zeros are pages that come into being when first written; torch.zeros writes all of them now.
        self.kv_caches = [
            (torch.from_numpy(np.zeros(shape, np.float32)), torch.from_numpy(np.zeros(shape, np.float32)))
            for _ in range(model.num_hidden_layers)
        ]
        self.block_transfer = BlockTransfer(self.kv_caches, cache.num_host_blocks)
        self._batch = _InputBatch(config)

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens' K and V, and the next token of each request that has caught up."""
        self._update_states(schedule)
        with torch.inference_mode():
            self.block_transfer.execute(schedule)  # also in a step that does nothing but preempt
        if not schedule.num_scheduled_tokens:
            return ModelRunnerOutput(sampled_token_ids={})
        step = self._prepare_inputs(schedule)
        with torch.inference_mode():
            embeds = self._inputs_embeds(step)
            # hidden is [T, C]
            hidden = self.model.forward(
                step.input_ids, step.positions, self.kv_caches, step.attention, embeds
            )
            prompt_logprobs, errors = self._prompt_logprobs(step, hidden)
            if not len(step.sampling_rows):
                kept: dict[str, np.ndarray] | None = {} if self.config.keep_logits else None
                return ModelRunnerOutput({}, errors, logits=kept, prompt_logprobs=prompt_logprobs)
            logits = self.model.compute_logits(hidden.index_select(0, step.logits_rows))  # [R, V]
            draws = self._draws(step, schedule.scheduled_spec_decode_tokens)
            is_one_each = len(draws.rows) == len(logits)
            drawn = logits if is_one_each else logits.index_select(0, torch.from_numpy(draws.rows))  # [M, V]
            metadata = self._sampling_metadata(draws, schedule)
            # The sampler works in place on the rows it processes, and what is handed out is the model's.
            spoils_raw = drawn is logits and (metadata.processed_rows or metadata.bitmasks)
            needs_raw = self.config.keep_logits or self._batch.num_logprobs
            raw = logits.clone() if spoils_raw and needs_raw else logits
            token_ids = self.sampler(drawn, metadata)  # one a draw
        output = self._make_output(step.sampling_rows, draws, token_ids, raw)
        output = replace(output, errors=output.errors | errors, prompt_logprobs=prompt_logprobs)
        if self.speculator is None:
            return output
        return replace(output, draft_token_ids=self._propose_drafts(schedule, output.sampled_token_ids))

    def _draws(self, step: _StepInput, drafts: Mapping[str, tuple[int, ...]]) -> _Draws:
        batch, rows = self._batch, step.sampling_rows
        is_first = batch.token_ids.lengths[rows] == batch.num_prompt_tokens[rows]  # [Q]
        counts = np.where(is_first, batch.num_sequences[rows], 1 + step.num_drafts)  # [Q]
        first_rows = np.cumsum(1 + step.num_drafts) - 1 - step.num_drafts  # [Q]
        indices = _ragged_arange(np.zeros_like(counts), counts)  # [M]
        is_sibling = np.repeat(is_first, counts)  # [M], or the first of them
        num_drafts = np.where(is_sibling, 0, indices)  # [M]
        return _Draws(
            counts=counts,
            rows=np.repeat(first_rows, counts) + num_drafts,
            requests=np.repeat(rows, counts),
            num_drafts=num_drafts,
            sequences=np.where(is_sibling, indices, 0),
            drafts=drafts,
        )

    def _update_states(self, schedule: SchedulerOutput) -> None:
        """Forget first: a request that was preempted, or an id that is used again, comes back as new."""
        gone = (*schedule.finished_req_ids, *schedule.preempted_req_ids)
        for request_id in gone:
            self._batch.remove(request_id)
        if self.speculator is not None and gone:
            self.speculator.forget(gone)
        for new in schedule.scheduled_new_reqs:
            self._batch.add(new)
        if schedule.scheduled_running_reqs:
            self._batch.update(schedule.scheduled_running_reqs)

    def _prepare_inputs(self, schedule: SchedulerOutput) -> _StepInput:
        """Lay the requests' scheduled tokens side by side, in the order of their rows."""
        batch = self._batch
        rows, counts = batch.scheduled(schedule.num_scheduled_tokens)  # [S]
        drafts = batch.drafts_of(rows, schedule.scheduled_spec_decode_tokens)
        num_drafts = np.array([len(each) for each in drafts], dtype=np.int64)  # [S]
        ends = batch.token_ids.lengths[rows] + num_drafts  # [S]
        starts = batch.num_computed_tokens[rows]  # [S]
        seq_lens = starts + counts  # [S]
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)  # [S + 1]
        np.cumsum(counts, out=query_start_loc[1:])
        # Behind its end a row reads as token 0 and block 0: a schedule that went too far must not pass.
        assert (seq_lens <= ends).all(), "scheduled beyond the known tokens"
        assert (seq_lens <= batch.block_tables.lengths[rows] * self.block_size).all(), (
            "scheduled beyond the blocks"
        )

        token_rows = np.repeat(rows, counts)  # [T]
        positions = _ragged_arange(starts, counts)  # [T]
        input_ids = batch.token_ids.values[token_rows, positions]  # [T]
        if num_drafts.any():
            is_draft = positions >= batch.token_ids.lengths[token_rows]  # [T]
            input_ids[is_draft] = list(chain.from_iterable(drafts))
        blocks = batch.block_tables.values[token_rows, positions // self.block_size].astype(np.int64)  # [T]
        slots = blocks * self.block_size + positions % self.block_size  # [T]

        caught_up = seq_lens == ends  # [S]
        num_drafts = num_drafts[caught_up]  # [Q]
        last_rows = query_start_loc[1:][caught_up] - 1  # [Q]
        return _StepInput(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            attention=AttentionMetadata(
                query_start_loc=torch.from_numpy(query_start_loc),
                seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
                block_tables=torch.from_numpy(batch.block_tables_of(rows)),
                slot_mapping=torch.from_numpy(slots),
            ),
            request_rows=rows,
            sampling_rows=rows[caught_up],
            num_drafts=num_drafts,
            logits_rows=torch.from_numpy(_ragged_arange(last_rows - num_drafts, 1 + num_drafts)),
        )

    def _spans(self, step: _StepInput, request_ids: Iterable[str]) -> Iterator[tuple[str, int, int, int]]:
        """(id, first position, first row, row behind the last) among the T of those that this step computes."""
        for request_id in request_ids:
            row = self._batch.row_of[request_id]
            s = int(np.searchsorted(step.request_rows, row))
            if s < len(step.request_rows) and step.request_rows[s] == row:
                first, last = step.attention.query_start_loc[s : s + 2].tolist()
                yield request_id, int(self._batch.num_computed_tokens[row]), first, last

    def _inputs_embeds(self, step: _StepInput) -> torch.Tensor | None:
        """[T, C]: given vectors at the positions of such prompts, and everywhere else the embedding of the token.

        None when every token of the step is one. A prompt that is through leaves the table.
        """
        embeds = None
        given = self._batch.prompt_embeds
        for request_id, start, first, last in self._spans(step, list(given)):
            rows = given[request_id][start : start + last - first]  # [rows, C]
            if embeds is None:
                embeds = self.model.embed_input_ids(step.input_ids)  # [T, C]
            embeds[first : first + len(rows)] = rows
            if start + last - first >= len(given[request_id]):
                del given[request_id]
        return embeds

    def _prompt_logprobs(
        self, step: _StepInput, hidden: torch.Tensor
    ) -> tuple[dict[str, PromptLogprobs], dict[str, str]]:
        """Of each prompt that asked for them, as far as this step has come; and those with a NaN, which are errors.

        The row of position p scores the token at p + 1, and the row of the last one scores no token of the prompt. A
        prompt that is through leaves the table, and is not scored again when it is only computed again.
        """
        batch = self._batch
        scored: dict[str, PromptLogprobs] = {}
        errors: dict[str, str] = {}
        for request_id, position, first, last in self._spans(step, list(batch.num_prompt_logprobs)):
            row, num_logprobs = batch.row_of[request_id], batch.num_prompt_logprobs[request_id]
            num_prompt_tokens = int(batch.num_prompt_tokens[row])
            start, end = position + 1, min(position + 1 + last - first, num_prompt_tokens)
            token_ids = batch.token_ids.values[row, start:end].tolist()
            rows = hidden[first : first + len(token_ids)]  # [rows, C]
            parts = (rows[i : i + PROMPT_ROWS] for i in range(0, len(rows), PROMPT_ROWS))
            logits = (self.model.compute_logits(part).numpy() for part in parts)
            found = top_prompt_logprobs(logits, start, token_ids, num_logprobs)
            if found is None:
                errors[request_id] = NAN_LOGITS
            elif token_ids:
                scored[request_id] = found
            if position + last - first >= num_prompt_tokens:
                del batch.num_prompt_logprobs[request_id]
        return scored, errors

    def _sampling_metadata(self, draws: _Draws, schedule: SchedulerOutput) -> SamplingMetadata:
        batch, rows = self._batch, draws.requests
        num_output_tokens = batch.token_ids.lengths[rows] - batch.num_prompt_tokens[rows]  # [M]
        seeds = batch.seeds[rows] + draws.sequences.astype(np.uint64)  # wraps at 2**64, as child_seed does
        return SamplingMetadata(
            temperature=torch.from_numpy(batch.temperature[rows]),
            top_k=torch.from_numpy(batch.top_k[rows]),
            top_p=torch.from_numpy(batch.top_p[rows]),
            min_p=torch.from_numpy(batch.min_p[rows]),
            seeds=torch.from_numpy(seeds.view(np.int64)),
            output_positions=torch.from_numpy(num_output_tokens + draws.num_drafts),
            processed_rows=self._processed_rows(draws),
            bitmasks=self._bitmasks(draws, schedule.grammar_bitmasks),
        )

    def _bitmasks(self, draws: _Draws, by_request: Mapping[str, np.ndarray]) -> dict[int, np.ndarray]:
        """Draw -> what a grammar allows there, for those of requests that have one."""
        if not by_request:
            return {}
        names = [self._batch.req_ids[row] for row in draws.requests.tolist()]
        return {
            r: by_request[name][num_drafts]
            for r, (name, num_drafts) in enumerate(zip(names, draws.num_drafts.tolist(), strict=True))
            if name in by_request
        }

    def _processed_rows(self, draws: _Draws) -> dict[int, ProcessedRow]:
        """Draw -> the processing of its row, for those that have any."""
        batch = self._batch
        if not batch.processed:
            return {}
        names = [batch.req_ids[row] for row in draws.requests.tolist()]
        return {
            r: batch.processed[name][0].followed_by(draws.drafts[name][:num_drafts] if num_drafts else ())
            for r, (name, num_drafts) in enumerate(zip(names, draws.num_drafts.tolist(), strict=True))
            if name in batch.processed
        }

    def _make_output(
        self, rows: np.ndarray, draws: _Draws, token_ids: list[int], logits: torch.Tensor
    ) -> ModelRunnerOutput:
        request_ids = [self._batch.req_ids[row] for row in rows.tolist()]
        sampled: dict[str, list[int]] = {}
        siblings: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        logprobs: dict[str, list[tuple[TokenLogprob, ...]]] = {}
        kept: dict[str, np.ndarray] = {}
        first_rows = draws.rows[np.cumsum(draws.counts) - draws.counts].tolist()  # [Q]
        start = 0
        for request_id, count, row in zip(request_ids, draws.counts.tolist(), first_rows, strict=True):
            drawn = token_ids[start : start + count]
            is_birth = bool(draws.sequences[start + count - 1])  # of n > 1 sequences
            accepted = drawn[:1]
            if count > 1 and not is_birth:
                accepted = _accepted_token_ids(draws.drafts[request_id], drawn)
            start += count
            if drawn[0] < 0:  # then so has the row of all siblings
                errors[request_id] = NO_TOKEN if drawn[0] == NO_TOKEN_LEFT else NAN_LOGITS
                continue
            sampled[request_id] = accepted
            if is_birth:
                siblings[request_id] = drawn[1:]
            num_logprobs = self._batch.num_logprobs.get(request_id)
            if not self.config.keep_logits and num_logprobs is None:
                continue
            values = logits[row : row + len(accepted)].numpy()  # [sampled tokens, V]
            kept[request_id] = values
            if num_logprobs is not None:
                for sequence, ids in enumerate([accepted, *([token] for token in drawn[1:] if is_birth)]):
                    logprobs[child_request_id(request_id, sequence)] = [
                        top_logprobs(values[j], token_id, num_logprobs) for j, token_id in enumerate(ids)
                    ]
        return ModelRunnerOutput(
            sampled_token_ids=sampled,
            errors=errors,
            sibling_token_ids=siblings,
            logits=kept if self.config.keep_logits else None,
            logprobs=logprobs,
        )

    def _propose_drafts(
        self, schedule: SchedulerOutput, sampled_token_ids: Mapping[str, list[int]]
    ) -> dict[str, list[int]]:
        """Guesses for the next step of those that just sampled, in scheduling order."""
        assert self.speculator is not None
        batch, requests = self._batch, []
        for request_id in schedule.num_scheduled_tokens:
            newest, params = sampled_token_ids.get(request_id), batch.guessable.get(request_id)
            if not newest or params is None:
                continue
            row = batch.row_of[request_id]
            length, num_prompt = int(batch.token_ids.lengths[row]), int(batch.num_prompt_tokens[row])
            num_tokens = length + len(newest)
            wanted = num_wanted_drafts(self.config, params, num_tokens, num_tokens - num_prompt, newest)
            if wanted:
                known = np.append(batch.token_ids.values[row, :length], np.array(newest, np.int32))
                seed = int(batch.seeds[row])
                requests.append(DraftRequest(request_id, known, num_prompt, params, seed, wanted))
        return self.speculator.propose(requests)
