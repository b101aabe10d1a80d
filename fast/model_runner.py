"""From a step's input to tokens. Twin: `reference/model_runner.py`.

What differs:

- Draws are arrays and not objects, and their sampling parameters are gathered from the persistent rows. Only when a
  request has a penalty or a grammar are the draws looked at one by one.
- The model is recorded and replayed in one call: `fast/cpu_forward.py` on the CPU, `fast/device_forward.py` on a GPU.
- On the CPU a greedy row takes the largest logit where the head computes it: only the other rows have logits written.
- A step that samples nothing, such as a lone prefill chunk, skips the head.
- The sampler works in place on the logits: they are copied only if somebody still asks for what the model said.

Source: vLLM's `v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fast import kernels
from fast.block_transfer import BlockTransfer
from fast.cpu_forward import PlannedForward
from fast.device_forward import DeviceForward
from fast.input_batch import InputBatch, StepInput
from fast.models import get_model_class
from fast.sampler import NO_TOKEN_LEFT, ProcessedRow, Sampler, SamplingMetadata
from reference.contracts.config import EngineConfig
from reference.contracts.logits import PROMPT_ROWS, top_logprobs, top_prompt_logprobs
from reference.contracts.protocols import Checkpoint
from reference.contracts.request import child_request_id
from reference.contracts.sampling_params import GREEDY_TEMPERATURE
from reference.contracts.schedule import (
    NAN_LOGITS,
    NO_TOKEN,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprob,
)
from reference.contracts.speculation import DraftRequest, Speculator, num_wanted_drafts


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

    def those(self, chosen: np.ndarray) -> _Draws:
        """The draws where `chosen`, bool [M], is true; `counts` stay those of all."""
        parts = (self.rows, self.requests, self.num_drafts, self.sequences)
        rows, requests, num_drafts, sequences = (part[chosen] for part in parts)
        return _Draws(self.counts, rows, requests, num_drafts, sequences, self.drafts)


@dataclass(frozen=True)
class _Sampled:
    """What a step drew, and the logits that were written."""

    token_ids: list[int]  # [M]
    rows: np.ndarray  # int64 [W], ascending: the rows that have logits
    logits: torch.Tensor  # float32 [W, V], as the model said

    def logits_of(self, row: int, count: int) -> np.ndarray:
        """float32 [count, V], of rows that have logits, from `row` on."""
        at = int(np.searchsorted(self.rows, row))
        return self.logits[at : at + count].cpu().numpy()


def _rows_of(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Distinct ascending rows of [T, C]."""
    return hidden if len(rows) == len(hidden) else hidden.index_select(0, rows)


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
    """Holds the weights, the KV cache and the batch.

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
        model, cache = config.model, config.cache
        self.config = config
        self.speculator = speculator
        self.device = kernels.on_device(config.device, getattr(torch, config.dtype))
        self.sampler = Sampler()
        # [N, B, Hkv, D]
        shape = (cache.num_blocks, cache.block_size, model.num_key_value_heads, model.head_dim)
        with kernels.using(self.device):
            self.model = get_model_class(model.architecture)(model, checkpoint)
            self.kv_caches = [
                (kernels.empty_cache(*shape), kernels.empty_cache(*shape))
                for _ in range(model.num_hidden_layers)
            ]
            self.block_transfer = BlockTransfer(self.kv_caches, cache.num_host_blocks)
        forward = PlannedForward if self.device is None else DeviceForward
        self.forward = forward(self.model, self.kv_caches, config)
        self.batch = InputBatch(config)

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens' K and V, and the next token of each request that has caught up."""
        with kernels.using(self.device):
            return self._execute(schedule)

    def _execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        self.batch.update_states(schedule)
        if self.speculator is not None:
            self.speculator.forget((*schedule.finished_req_ids, *schedule.preempted_req_ids))
        with torch.inference_mode():
            self.block_transfer.execute(schedule)  # also in a step that does nothing but preempt
        if not schedule.num_scheduled_tokens:
            return ModelRunnerOutput(sampled_token_ids={})
        step = self.batch.prepare_inputs(schedule)
        with torch.inference_mode():
            step = self.forward.load(step)
            embeds = self._inputs_embeds(step)
            hidden = self.forward(step, embeds)  # [T, C]
            prompt_logprobs, errors = self._prompt_logprobs(step, hidden)
            if not len(step.sampled_rows.requests):
                kept: dict[str, np.ndarray] | None = {} if self.config.keep_logits else None
                return ModelRunnerOutput({}, errors, logits=kept, prompt_logprobs=prompt_logprobs)
            draws = self._draws(step, schedule.scheduled_spec_decode_tokens)
            sampled = self._sample(_rows_of(hidden, step.logits_rows), draws, schedule)
        output = self._make_output(draws, sampled)
        self.batch.newest = output.sampled_token_ids
        output = replace(output, errors=output.errors | errors, prompt_logprobs=prompt_logprobs)
        if self.speculator is None:
            return output
        return replace(output, draft_token_ids=self._propose_drafts(schedule, output.sampled_token_ids))

    def _sample(self, hidden: torch.Tensor, draws: _Draws, schedule: SchedulerOutput) -> _Sampled:
        """One token a draw, from the hidden states [R, C]."""
        is_argmax = self._is_argmax(draws, schedule)  # [M]
        if not is_argmax.any():
            return self._sample_logits(np.arange(len(hidden)), hidden, draws, schedule)
        if is_argmax.all() and len(is_argmax) == len(hidden):  # one draw a row
            return _Sampled(self._argmax(hidden).tolist(), np.empty(0, np.int64), hidden[:0])  # no logits
        token_ids = np.empty(len(is_argmax), dtype=np.int64)  # [M]
        rows, places = np.unique(draws.rows[is_argmax], return_inverse=True)
        token_ids[is_argmax] = self._argmax(_rows_of(hidden, torch.from_numpy(rows)))[places]
        if is_argmax.all():
            return _Sampled(token_ids.tolist(), np.empty(0, np.int64), hidden[:0])
        others = draws.those(~is_argmax)
        rows = np.unique(others.rows)
        sampled = self._sample_logits(rows, _rows_of(hidden, torch.from_numpy(rows)), others, schedule)
        token_ids[~is_argmax] = sampled.token_ids
        return replace(sampled, token_ids=token_ids.tolist())

    def _argmax(self, hidden: torch.Tensor) -> np.ndarray:
        """[R, C] -> the largest logit's token of each row, int64 [R]."""
        token_ids = np.empty(len(hidden), dtype=np.int64)
        kernels.linear_argmax(torch.from_numpy(token_ids), hidden, self.model.lm_head.weight)
        return token_ids

    def _is_argmax(self, draws: _Draws, schedule: SchedulerOutput) -> np.ndarray:
        """bool [M]: draws of the largest logit, when nobody changes the logits first or asks for them."""
        batch = self.batch
        if self.device is not None or self.config.keep_logits:
            return np.zeros(len(draws.rows), dtype=bool)
        is_greedy: np.ndarray = batch.temperature[draws.requests] < GREEDY_TEMPERATURE
        readers = {*batch.processed, *batch.num_logprobs, *schedule.grammar_bitmasks}
        if readers:
            is_greedy &= ~np.isin(draws.requests, [batch.row_of[request_id] for request_id in readers])
        return is_greedy

    def _sample_logits(
        self, rows: np.ndarray, hidden: torch.Tensor, draws: _Draws, schedule: SchedulerOutput
    ) -> _Sampled:
        """Draws from the logits of `rows`, int64 [W], whose hidden states are [W, C]."""
        metadata = self._sampling_metadata(draws, schedule)
        needs_raw = self.config.keep_logits or self.batch.num_logprobs
        changes = metadata.processed_rows or metadata.bitmasks
        logits = self._logits(hidden)  # [W, V]
        places = np.searchsorted(rows, draws.rows)  # [M], of the draws' rows among these
        is_one_each = len(places) == len(logits)
        # [M, V]
        drawn = logits if is_one_each else logits.index_select(0, kernels.place(torch.from_numpy(places)))
        # The sampler works in place on the rows it processes, and what is handed out is the model's.
        raw = logits.clone() if drawn is logits and changes and needs_raw else logits
        return _Sampled(self.sampler(drawn, metadata), rows, raw)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, C] -> [R, V], float32 whatever the model computes in: sampling needs the digits."""
        return self.model.compute_logits(hidden).float()

    def _inputs_embeds(self, step: StepInput) -> torch.Tensor | None:
        """[T, C]: given vectors at the positions of such prompts, and everywhere else the embedding of the token.

        None when every token of the step is one.
        """
        if not step.given_embeds:
            return None
        embeds: torch.Tensor = self.model.embed_input_ids(step.input_ids)  # [T, C]
        for first, given in step.given_embeds.items():
            embeds[first : first + len(given)] = given
        return embeds

    def _draws(self, step: StepInput, drafts: Mapping[str, tuple[int, ...]]) -> _Draws:
        batch, rows, num_drafts = self.batch, step.sampled_rows.requests, step.sampled_rows.num_drafts
        if not drafts and (batch.num_sequences[rows] == 1).all():  # nearly every step
            nothing = np.zeros_like(rows)
            return _Draws(np.ones_like(rows), np.arange(len(rows)), rows, nothing, nothing, drafts)
        is_first = batch.token_ids.lengths[rows] == batch.num_prompt_tokens[rows]  # [Q]
        counts = np.where(is_first, batch.num_sequences[rows], 1 + num_drafts)  # [Q]
        first_rows = np.cumsum(1 + num_drafts) - 1 - num_drafts  # [Q]
        first_draws = counts.cumsum() - counts  # [Q]
        indices = np.arange(counts.sum()) - np.repeat(first_draws, counts)  # [M], among those of the request
        is_sibling = np.repeat(is_first, counts)  # [M], or the first of them
        num_taken = np.where(is_sibling, 0, indices)  # [M]
        return _Draws(
            counts=counts,
            rows=np.repeat(first_rows, counts) + num_taken,
            requests=np.repeat(rows, counts),
            num_drafts=num_taken,
            sequences=np.where(is_sibling, indices, 0),
            drafts=drafts,
        )

    def _prompt_logprobs(
        self, step: StepInput, hidden: torch.Tensor
    ) -> tuple[dict[str, PromptLogprobs], dict[str, str]]:
        """Of each prompt that asked for them, as far as this step has come; and those with a NaN, which are errors.

        The row of position p scores the token at p + 1, and the row of the last one scores no token of the prompt. A
        prompt that is through leaves the table, and is not scored again when it is only computed again.
        """
        batch = self.batch
        scored: dict[str, PromptLogprobs] = {}
        errors: dict[str, str] = {}
        for request_id, computed in step.scored_rows.items():
            row, num_logprobs = batch.row_of[request_id], batch.num_prompt_logprobs[request_id]
            num_prompt_tokens = int(batch.num_prompt_tokens[row])
            start = int(batch.num_computed_tokens[row]) + 1
            end = start + len(computed)
            token_ids = batch.token_ids.values[row, start : min(end, num_prompt_tokens)].tolist()
            rows = hidden[computed.start : computed.start + len(token_ids)]  # [rows, C]
            parts = (rows[i : i + PROMPT_ROWS] for i in range(0, len(rows), PROMPT_ROWS))
            logits = (self._logits(part).cpu().numpy() for part in parts)
            found = top_prompt_logprobs(logits, start, token_ids, num_logprobs)
            if found is None:
                errors[request_id] = NAN_LOGITS
            elif token_ids:
                scored[request_id] = found
            if end > num_prompt_tokens:
                del batch.num_prompt_logprobs[request_id]
        return scored, errors

    def _sampling_metadata(self, draws: _Draws, schedule: SchedulerOutput) -> SamplingMetadata:
        batch, rows = self.batch, draws.requests
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
        names = [self.batch.req_ids[row] for row in draws.requests.tolist()]
        return {
            r: by_request[name][num_drafts]
            for r, (name, num_drafts) in enumerate(zip(names, draws.num_drafts.tolist(), strict=True))
            if name in by_request
        }

    def _processed_rows(self, draws: _Draws) -> dict[int, ProcessedRow]:
        """Draw -> the processing of its row, for those that have any."""
        batch = self.batch
        if not batch.processed:
            return {}
        names = [batch.req_ids[row] for row in draws.requests.tolist()]
        return {
            r: batch.processed[name][0].followed_by(draws.drafts[name][:num_drafts] if num_drafts else ())
            for r, (name, num_drafts) in enumerate(zip(names, draws.num_drafts.tolist(), strict=True))
            if name in batch.processed
        }

    def _make_output(self, draws: _Draws, step: _Sampled) -> ModelRunnerOutput:
        first_draws = draws.counts.cumsum() - draws.counts  # [Q]
        request_ids = [self.batch.req_ids[row] for row in draws.requests[first_draws].tolist()]
        sampled: dict[str, list[int]] = {}
        siblings: dict[str, list[int]] = {}
        errors: dict[str, str] = {}
        logprobs: dict[str, list[tuple[TokenLogprob, ...]]] = {}
        kept: dict[str, np.ndarray] = {}
        first_rows = draws.rows[first_draws].tolist()  # [Q]
        start = 0
        for request_id, count, row in zip(request_ids, draws.counts.tolist(), first_rows, strict=True):
            drawn = step.token_ids[start : start + count]
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
            num_logprobs = self.batch.num_logprobs.get(request_id)
            if not self.config.keep_logits and num_logprobs is None:
                continue
            values = step.logits_of(row, len(accepted))  # [sampled tokens, V]
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
        batch, requests = self.batch, []
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
