"""From schedules to one flat batch: what the runner knows of each request, and a step's tokens laid side by side.

The batch is rebuilt from nothing in every step, so that each of its arrays can be read beside its definition. Requests
stand one after the other in scheduling order:

    request r computes positions [c, c + n), where c = num_computed_tokens and n = num_scheduled_tokens[r]
    it samples when c + n reaches its last known token; otherwise this was one chunk of a prefill
    drafts stand behind that token: with m of them it samples from 1 + m rows, the j-th as if j drafts were output

Fast twin: `fast/input_batch.py`, which keeps the batch between steps. Source: vLLM's `v1/worker/gpu_input_batch.py` and
`_prepare_inputs` in `v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.attention import AttentionMetadata
from reference.contracts.config import EngineConfig
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import SchedulerOutput


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

    @property
    def is_scored(self) -> bool:
        """Once there is output the prompt was scored before, and it is only computed again."""
        return self.sampling_params.prompt_logprobs is not None and self.num_output_tokens == 0


@dataclass(frozen=True)
class StepInput:
    """One step's input. Rows of one request are contiguous; see `AttentionMetadata` for who is who."""

    input_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    attention: AttentionMetadata
    # First of the T -> float32 [rows, C]: vectors of a prompt that came as such, in place of its tokens' embeddings
    given_embeds: dict[int, np.ndarray]
    scored_rows: dict[str, range]  # which of the T are those of a prompt that is to be scored
    # int64 [R], of the T: for each request that reaches its last known token, this one and its drafts
    logits_rows: np.ndarray
    sampled_rows: dict[str, range]  # which of the R are a request's


class InputBatch:
    """A copy of every scheduled request's tokens and block table.

    Args:
        config: for the block size.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.block_size = config.cache.block_size
        self.states: dict[str, _RequestState] = {}
        self.newest: dict[
            str, list[int]
        ] = {}  # what the last step has drawn: placeholders of this one stand for it

    def update_states(self, schedule: SchedulerOutput) -> None:
        """Forget first: a request that was preempted earlier, or an id that is used again, comes back as new."""
        for request_id in (*schedule.finished_req_ids, *schedule.preempted_req_ids):
            self.states.pop(request_id, None)
        for new in schedule.scheduled_new_reqs:
            self.states[new.request_id] = _RequestState(
                token_ids=list(new.token_ids),
                block_ids=list(new.block_ids),
                num_prompt_tokens=new.num_prompt_tokens,
                num_computed_tokens=new.num_computed_tokens,
                sampling_params=new.sampling_params,
                seed=new.seed,
                prompt_embeds=new.prompt_embeds,
            )
        for running in schedule.scheduled_running_reqs:
            state = self.states[running.request_id]
            state.token_ids.extend(running.known_token_ids(self.newest))
            if running.block_copy is not None:
                state.block_ids[running.block_copy.index] = running.block_copy.target
            state.block_ids.extend(running.new_block_ids)
            state.num_computed_tokens = running.num_computed_tokens

    def prepare_inputs(self, schedule: SchedulerOutput) -> StepInput:
        """Lay the requests' scheduled tokens side by side, in scheduling order. At least one is scheduled."""
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start_loc = [0]
        seq_lens: list[int] = []
        given_embeds: dict[int, np.ndarray] = {}
        scored_rows: dict[str, range] = {}
        logits_rows: list[int] = []
        sampled_rows: dict[str, range] = {}
        for request_id, num_scheduled in schedule.num_scheduled_tokens.items():
            state = self.states[request_id]
            first, start = len(input_ids), state.num_computed_tokens
            end = start + num_scheduled
            drafts = schedule.scheduled_spec_decode_tokens.get(request_id, ())
            token_ids = [*state.token_ids, *drafts]
            input_ids += token_ids[start:end]
            positions += range(start, end)
            slots += [self._slot(state.block_ids, position) for position in range(start, end)]
            query_start_loc.append(len(input_ids))
            seq_lens.append(end)
            if state.prompt_embeds is not None and start < state.num_prompt_tokens:
                given_embeds[first] = state.prompt_embeds[start:end]
            if state.is_scored:
                scored_rows[request_id] = range(first, len(input_ids))
            if end == len(token_ids):
                logits_rows += range(len(input_ids) - 1 - len(drafts), len(input_ids))
                sampled_rows[request_id] = range(len(logits_rows) - 1 - len(drafts), len(logits_rows))

        attention = AttentionMetadata(
            query_start_loc=np.array(query_start_loc, dtype=np.int32),
            seq_lens=np.array(seq_lens, dtype=np.int32),
            block_tables=self._block_tables(list(schedule.num_scheduled_tokens)),
            slot_mapping=np.array(slots, dtype=np.int64),
        )
        return StepInput(
            input_ids=np.array(input_ids, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            attention=attention,
            given_embeds=given_embeds,
            scored_rows=scored_rows,
            logits_rows=np.array(logits_rows, dtype=np.int64),
            sampled_rows=sampled_rows,
        )

    def _slot(self, block_ids: list[int], position: int) -> int:
        """Where the K and V of a position live: logical block -> physical block -> slot."""
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _block_tables(self, request_ids: list[str]) -> np.ndarray:
        """Block tables of unequal length as one array, padded with the null block: int32 [S, max_blocks]."""
        tables = [self.states[request_id].block_ids for request_id in request_ids]
        padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        for s, table in enumerate(tables):
            padded[s, : len(table)] = table
        return padded
