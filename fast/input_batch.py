"""From schedules to one flat batch. Twin: `reference/input_batch.py`.

What differs:

- The batch is persistent: a request keeps one row of preallocated arrays from admission to its end, and a
  step applies only what changed. The twin rebuilds everything from lists in every step.
- A step's input is made by array arithmetic (repeat, cumulative sum, one gather): there is no Python loop
  over tokens, and the only loops over requests read the schedule.
- Requests stand in the order of their rows, not of the schedule. When all of them are scheduled, the block
  tables the kernels read are a view of the persistent table.
- Drafts never enter the persistent rows: they are laid over the step's input, so a rejected one leaves no trace.
- Prompts that are scored and prompts that came as vectors are kept in tables of their own: a step without any does
  not look for them.

Source: vLLM's `v1/worker/gpu_input_batch.py` and `_prepare_inputs` in `v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from fast.attention import AttentionMetadata
from fast.sampler import ProcessedRow
from reference.contracts.config import EngineConfig, cdiv
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import (
    NewRequestData,
    RunningRequestData,
    SchedulerOutput,
)


def _ragged_arange(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ranges [starts[i], starts[i] + counts[i]), one after the other: int64 [sum of counts]."""
    ends = counts.cumsum()
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
        values = np.fromiter(chain.from_iterable(parts), dtype=np.int32)
        starts = self.lengths[rows]
        if (counts == 1).all():  # a decode
            self.values[rows, starts] = values
        else:
            self.values[np.repeat(rows, counts), _ragged_arange(starts, counts)] = values
        self.lengths[rows] = starts + counts

    def move_row(self, source: int, target: int) -> None:
        width = max(self.lengths[source], self.lengths[target])  # the zeros too, where the target was longer
        self.values[target, :width] = self.values[source, :width]
        self.lengths[target] = self.lengths[source]


@dataclass(frozen=True)
class _SampledRows:
    """The R rows of Q requests, one request after the other: a request has one row more than drafts."""

    requests: np.ndarray  # int64 [Q], batch rows, ascending
    num_drafts: np.ndarray  # int64 [Q]


@dataclass(frozen=True)
class StepInput:
    """One step's input. Rows of one request are contiguous; see `AttentionMetadata` for who is who."""

    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int64 [T]
    attention: AttentionMetadata
    # First of the T -> float32 [rows, C]: vectors of a prompt that came as such, in place of its tokens' embeddings
    given_embeds: dict[int, torch.Tensor]
    scored_rows: dict[str, range]  # which of the T are those of a prompt that is to be scored
    # int64 [R], of the T: for each request that reaches its last known token, this one and its drafts
    logits_rows: torch.Tensor
    sampled_rows: _SampledRows


class InputBatch:
    """One row a request. Rows [0, num_requests) are in use, without holes and in no meaningful order.

    A running request that a step does not schedule keeps its row. `max_num_seqs` rows suffice: the requests
    with state here are the scheduler's running ones, and those that left them are removed before new ones are
    added.

    Args:
        config: sizes of the arrays.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.block_size = config.cache.block_size
        rows, max_model_len = config.scheduler.max_num_seqs, config.scheduler.max_model_len
        self.newest: dict[
            str, list[int]
        ] = {}  # what the last step has drawn: placeholders of this one stand for it
        self.req_ids: list[str] = []
        self.row_of: dict[str, int] = {}
        self.token_ids = _RaggedTable(rows, max_model_len)
        self.block_tables = _RaggedTable(rows, cdiv(max_model_len, self.block_size))
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

    def update_states(self, schedule: SchedulerOutput) -> None:
        """Forget first: a request that was preempted, or an id that is used again, comes back as new."""
        for request_id in (*schedule.finished_req_ids, *schedule.preempted_req_ids):
            self._remove(request_id)
        for new in schedule.scheduled_new_reqs:
            self._add(new)
        if schedule.scheduled_running_reqs:
            self._update(schedule.scheduled_running_reqs)

    def _add(self, new: NewRequestData) -> None:
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

    def _remove(self, request_id: str) -> None:
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

    def _update(self, running: Sequence[RunningRequestData]) -> None:
        """Apply the deltas of all running requests."""
        rows = np.array([self.row_of[delta.request_id] for delta in running], dtype=np.int64)  # [S]
        self.num_computed_tokens[rows] = [delta.num_computed_tokens for delta in running]
        new_token_ids = [delta.known_token_ids(self.newest) for delta in running]
        self.token_ids.append(rows, new_token_ids)
        for i, delta in enumerate(running):
            if delta.block_copy is not None:
                self.block_tables.values[rows[i], delta.block_copy.index] = delta.block_copy.target
        if self.processed:
            for delta, token_ids in zip(running, new_token_ids, strict=True):
                if delta.request_id in self.processed:
                    self.processed[delta.request_id][1].extend(token_ids)
        grown = [i for i, delta in enumerate(running) if delta.new_block_ids]
        if grown:  # a decode takes a new block in one step of B
            self.block_tables.append(rows[grown], [running[i].new_block_ids for i in grown])

    def prepare_inputs(self, schedule: SchedulerOutput) -> StepInput:
        """Lay the requests' scheduled tokens side by side, in the order of their rows. At least one is scheduled."""
        rows, counts = self._scheduled(schedule.num_scheduled_tokens)  # [S]
        drafts, num_drafts = self._drafts_of(rows, schedule.scheduled_spec_decode_tokens)
        ends = self.token_ids.lengths[rows] + num_drafts  # [S]
        starts = self.num_computed_tokens[rows]  # [S]
        seq_lens = starts + counts  # [S]
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)  # [S + 1]
        np.cumsum(counts, out=query_start_loc[1:])
        # Behind its end a row reads as token 0 and block 0: a schedule that went too far must not pass.
        assert (seq_lens <= ends).all(), "scheduled beyond the known tokens"
        max_lens = self.block_tables.lengths[rows] * self.block_size  # [S]
        assert (seq_lens <= max_lens).all(), "scheduled beyond the blocks"

        token_rows, positions = rows, starts  # [T]: one token each, in nearly every step
        if query_start_loc[-1] > len(rows):
            token_rows, positions = np.repeat(rows, counts), _ragged_arange(starts, counts)
        input_ids = self.token_ids.values[token_rows, positions]  # [T]
        if drafts:
            is_draft = positions >= self.token_ids.lengths[token_rows]  # [T]
            input_ids[is_draft] = list(chain.from_iterable(drafts))
        block_indices, offsets = np.divmod(positions, self.block_size)  # [T]
        slots = (
            self.block_tables.values[token_rows, block_indices] * np.int64(self.block_size) + offsets
        )  # [T]

        caught_up = seq_lens == ends  # [S]
        num_drafts = num_drafts[caught_up]  # [Q]
        last_rows = query_start_loc[1:][caught_up] - 1  # [Q]
        return StepInput(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            attention=AttentionMetadata(
                query_start_loc=torch.from_numpy(query_start_loc),
                seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
                block_tables=torch.from_numpy(self._block_tables_of(rows)),
                slot_mapping=torch.from_numpy(slots),
            ),
            given_embeds=self._given_embeds(rows, query_start_loc),
            scored_rows=dict(self._spans(self.num_prompt_logprobs, rows, query_start_loc)),
            logits_rows=torch.from_numpy(
                _ragged_arange(last_rows - num_drafts, 1 + num_drafts) if drafts else last_rows
            ),
            sampled_rows=_SampledRows(rows[caught_up], num_drafts),
        )

    def _spans(
        self, request_ids: Iterable[str], rows: np.ndarray, query_start_loc: np.ndarray
    ) -> Iterator[tuple[str, range]]:
        """Which of the T are a request's, for those that are among these ascending rows."""
        for request_id in request_ids:
            row = self.row_of[request_id]
            s = int(np.searchsorted(rows, row))
            if s < len(rows) and rows[s] == row:
                first, last = query_start_loc[s : s + 2].tolist()
                yield request_id, range(first, last)

    def _given_embeds(self, rows: np.ndarray, query_start_loc: np.ndarray) -> dict[int, torch.Tensor]:
        """See `StepInput`. A prompt that is through leaves the table."""
        given = {}
        for request_id, computed in self._spans(list(self.prompt_embeds), rows, query_start_loc):
            vectors = self.prompt_embeds[request_id]
            start = int(self.num_computed_tokens[self.row_of[request_id]])
            end = start + len(computed)
            if start < len(vectors):
                given[computed.start] = vectors[start:end]  # [rows, C]
            if end >= len(vectors):
                del self.prompt_embeds[request_id]
        return given

    def _scheduled(self, num_scheduled_tokens: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
        """Scheduled rows, ascending, and their numbers of tokens: two int64 [S]."""
        counts = np.zeros(len(self.req_ids), dtype=np.int64)  # [num_requests]
        unordered = [self.row_of[request_id] for request_id in num_scheduled_tokens]
        counts[unordered] = list(num_scheduled_tokens.values())
        rows = np.flatnonzero(counts)
        return rows, counts[rows]

    def _drafts_of(
        self, rows: np.ndarray, by_request: Mapping[str, tuple[int, ...]]
    ) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """The drafts of each row, an empty list if nobody has any; and how many: int64 [S]."""
        if not by_request:
            return [], np.zeros_like(rows)
        drafts = [by_request.get(self.req_ids[row], ()) for row in rows.tolist()]
        return drafts, np.array([len(each) for each in drafts], dtype=np.int64)

    def _block_tables_of(self, rows: np.ndarray) -> np.ndarray:
        """int32 [S, max_blocks], cut to the longest of these ascending rows; a view if they are all rows."""
        max_blocks = self.block_tables.lengths[rows].max()
        if len(rows) == len(self.req_ids):
            return self.block_tables.values[: len(rows), :max_blocks]
        selected: np.ndarray = self.block_tables.values[rows, :max_blocks]
        return selected
