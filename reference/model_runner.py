"""From a step's input to tokens: the forward pass, a draw for each row that samples, and guesses for the next step.

What the rows are is decided in `reference/input_batch.py`: a request that reached its last known token samples from the
row of that token, and from one more for each draft behind it. All rows are drawn at once, each as if the drafts before
it were output; afterwards only the draws count that this turned out to be true for.

Fast twin: `fast/model_runner.py`. Source: vLLM's `v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from reference.block_transfer import BlockTransfer
from reference.contracts.config import EngineConfig
from reference.contracts.logits import PROMPT_ROWS, top_logprobs, top_prompt_logprobs
from reference.contracts.protocols import Checkpoint
from reference.contracts.request import child_request_id, child_seed
from reference.contracts.schedule import (
    NAN_LOGITS,
    NO_TOKEN,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprob,
)
from reference.contracts.speculation import DraftRequest, Speculator, num_wanted_drafts
from reference.input_batch import InputBatch, StepInput
from reference.models import get_model_class
from reference.sampler import NO_TOKEN_LEFT, ProcessedRow, Sampler, SamplingMetadata


@dataclass(frozen=True)
class _Draw:
    """A token to be drawn."""

    request_id: str
    row: int  # of the R
    sequence: int  # of a request with n > 1
    drafts: tuple[int, ...]  # taken for output


class ModelRunner:
    """Holds the weights, the KV cache and the batch.

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
        if (config.device, config.dtype) != ("cpu", "float32"):
            raise ValueError(
                f"The reference tier computes in float32 on the CPU, not in {config.dtype} on {config.device!r}: "
                "use the fast tier for another device or dtype."
            )
        model, cache = config.model, config.cache
        self.config = config
        self.speculator = speculator
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
        self.batch = InputBatch(config)

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens' K and V, and the next token of each request that has caught up."""
        self.batch.update_states(schedule)
        if self.speculator is not None:
            self.speculator.forget((*schedule.finished_req_ids, *schedule.preempted_req_ids))
        self.block_transfer.execute(schedule)  # also in a step that does nothing but preempt
        if not schedule.num_scheduled_tokens:
            return ModelRunnerOutput(sampled_token_ids={})
        step = self.batch.prepare_inputs(schedule)
        embeds = self._inputs_embeds(step)
        # hidden is [T, C]
        hidden = self.model.forward(step.input_ids, step.positions, self.kv_caches, step.attention, embeds)
        logits = self.model.compute_logits(hidden[step.logits_rows])  # [R, V]
        draws = self._draws(step.sampled_rows, schedule)
        token_ids = self.sampler(
            logits[[draw.row for draw in draws]], self._sampling_metadata(draws, schedule)
        )
        prompt_logprobs, errors = self._prompt_logprobs(step, hidden)
        output = self._make_output(step.sampled_rows, draws, token_ids, logits)
        self.batch.newest = output.sampled_token_ids
        return replace(
            output,
            errors=output.errors | errors,
            prompt_logprobs=prompt_logprobs,
            draft_token_ids=self._propose_drafts(output.sampled_token_ids),
        )

    def _inputs_embeds(self, step: StepInput) -> np.ndarray | None:
        """[T, C]: given vectors at the positions of such prompts, and everywhere else the embedding of the token.

        None when every token of the step is one.
        """
        if not step.given_embeds:
            return None
        embeds: np.ndarray = self.model.embed_input_ids(step.input_ids)  # [T, C]
        for first, given in step.given_embeds.items():
            embeds[first : first + len(given)] = given
        return embeds

    def _draws(self, sampled_rows: dict[str, range], schedule: SchedulerOutput) -> list[_Draw]:
        """One draw a row; but when a prompt with n > 1 is complete, its one row gives all n sequences a first token."""
        draws = []
        for request_id, rows in sampled_rows.items():
            state = self.batch.states[request_id]
            drafts = schedule.scheduled_spec_decode_tokens.get(request_id, ())
            draws += [_Draw(request_id, row, 0, drafts[:j]) for j, row in enumerate(rows)]
            if state.num_output_tokens == 0:
                siblings = range(1, state.sampling_params.n)
                draws += [_Draw(request_id, rows[0], sequence, ()) for sequence in siblings]
        return draws

    def _prompt_logprobs(
        self, step: StepInput, hidden: np.ndarray
    ) -> tuple[dict[str, PromptLogprobs], dict[str, str]]:
        """Of each prompt that asked for them, as far as this step has come; and those with a NaN, which are errors.

        The row of position p scores the token at p + 1, and the row of the last one scores no token of the prompt.
        """
        scored: dict[str, PromptLogprobs] = {}
        errors: dict[str, str] = {}
        for request_id, computed in step.scored_rows.items():
            state = self.batch.states[request_id]
            num_logprobs = state.sampling_params.prompt_logprobs
            assert num_logprobs is not None
            start = state.num_computed_tokens + 1
            token_ids = state.token_ids[start : start + len(computed)]
            rows = hidden[computed.start : computed.start + len(token_ids)]  # [rows, C]
            parts = np.split(rows, range(PROMPT_ROWS, len(rows), PROMPT_ROWS))
            found = top_prompt_logprobs(map(self.model.compute_logits, parts), start, token_ids, num_logprobs)
            if found is None:
                errors[request_id] = NAN_LOGITS
            elif token_ids:
                scored[request_id] = found
        return scored, errors

    def _sampling_metadata(self, draws: list[_Draw], schedule: SchedulerOutput) -> SamplingMetadata:
        states = [self.batch.states[draw.request_id] for draw in draws]
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
            num_logprobs = self.batch.states[request_id].sampling_params.logprobs
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
            state = self.batch.states[request_id]
            params, known = state.sampling_params, state.token_ids + newest
            num_output = len(known) - state.num_prompt_tokens
            wanted = num_wanted_drafts(self.config, params, len(known), num_output, newest)
            if wanted and state.prompt_embeds is None:
                requests.append(
                    DraftRequest(request_id, known, state.num_prompt_tokens, params, state.seed, wanted)
                )
        return self.speculator.propose(requests)
