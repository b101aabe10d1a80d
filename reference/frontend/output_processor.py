"""From the engine core's news to `RequestOutput`s: text, stop strings, finish reasons, times."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from reference.contracts.request import EngineCoreRequest, child_request_id
from reference.contracts.schedule import EngineCoreOutput, PromptLogprobs, TokenLogprob
from reference.frontend.detokenizer import IncrementalDetokenizer
from reference.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from reference.frontend.tokenizer import Tokenizer


def _as_table(entries: Iterable[TokenLogprob], tokenizer: Tokenizer) -> dict[int, Logprob]:
    return {e.token_id: Logprob(e.logprob, e.rank, tokenizer.decode([e.token_id], False)) for e in entries}


class _Sequence:
    """One of the n sequences of a request: its text so far, and how it ended."""

    def __init__(self, index: int, detokenizer: IncrementalDetokenizer) -> None:
        self.index = index
        self.detokenizer = detokenizer
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_preemptions = 0
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.cumulative_logprob: float | None = None
        if detokenizer.params.logprobs is not None:
            self.logprobs, self.cumulative_logprob = [], 0.0

    def add_logprobs(self, new_logprobs: Iterable[tuple[TokenLogprob, ...]]) -> None:
        """One table a token that the detokenizer kept: those behind a stop string are dropped here too."""
        if self.logprobs is None or self.cumulative_logprob is None:
            return
        for entries in islice(new_logprobs, len(self.detokenizer.token_ids) - len(self.logprobs)):
            self.cumulative_logprob += entries[0].logprob
            self.logprobs.append(_as_table(entries, self.detokenizer.tokenizer))

    def make_output(self) -> CompletionOutput:
        delta_text = self.detokenizer.take_delta(finished=self.finish_reason is not None)
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.given_text,
            token_ids=list(self.detokenizer.token_ids),
            delta_text=delta_text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            cumulative_logprob=self.cumulative_logprob,
        )


class _RequestState:
    """What the front end remembers of one unfinished request with its n sequences."""

    def __init__(self, request: EngineCoreRequest, prompt: str | None, tokenizer: Tokenizer) -> None:
        params = request.sampling_params
        self.request_id = request.request_id
        self.prompt = prompt
        self.tokenizer = tokenizer
        # The ids of a prompt that came as embeddings only hold the places.
        self.prompt_token_ids = list(request.prompt_token_ids) if request.prompt_embeds is None else []
        # Of the positions known so far, from 0 on; position 0 has none.
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.sequences = [_Sequence(i, IncrementalDetokenizer(tokenizer, params)) for i in range(params.n)]
        self.metrics = RequestMetrics(num_prompt_tokens=len(request.prompt_token_ids))
        self.arrived = time.perf_counter()
        self.error: str | None = None

    @property
    def sequence_ids(self) -> list[str]:
        """The ids under which the engine core knows the sequences."""
        return [child_request_id(self.request_id, sequence.index) for sequence in self.sequences]

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def add_prompt_logprobs(self, new: PromptLogprobs | None) -> None:
        """By position: a prompt that is preempted half-way is computed from its start again."""
        if new is not None and self.prompt_logprobs is not None:
            assert new.start <= len(self.prompt_logprobs), "a part of the prompt was never scored"
            tables = [_as_table(entries, self.tokenizer) for entries in new.entries]
            self.prompt_logprobs[new.start : new.start + len(tables)] = tables

    def make_output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.make_output() for sequence in self.sequences],
            finished=self.is_finished,
            metrics=replace(self.metrics),  # an output that was handed out does not change
            error=self.error,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
        )


class OutputProcessor:
    """Owns the text side of all unfinished requests; a finished one leaves nothing behind."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.states: dict[str, _RequestState] = {}
        self.sequences: dict[str, tuple[_RequestState, _Sequence]] = {}  # unfinished ones, by their own id

    def add_request(self, request: EngineCoreRequest, prompt: str | None) -> None:
        state = _RequestState(request, prompt, self.tokenizer)
        self.states[request.request_id] = state
        self.sequences.update(
            (sequence_id, (state, sequence))
            for sequence_id, sequence in zip(state.sequence_ids, state.sequences, strict=True)
        )

    def note_admitted(self, queue_times: Mapping[str, float]) -> None:
        """Requests that run now -> seconds they had waited. Those that were aborted meanwhile are ignored."""
        for request_id, seconds in queue_times.items():
            if request_id in self.states:
                self.states[request_id].metrics.queue_s = seconds

    def process_outputs(self, news: Iterable[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Returns an output a request that has news, and the ids of sequences that a stop string ended: the engine core
        must abort those."""
        touched: dict[str, _RequestState] = {}
        to_abort = []
        for item in news:
            if item.request_id not in self.sequences:
                continue  # aborted, or ended by a stop string, while its last step ran
            state, sequence = self.sequences[item.request_id]
            state.add_prompt_logprobs(item.prompt_logprobs)
            if not item.new_token_ids and not item.finished:
                continue  # a chunk of a prompt was scored: nothing yet that a caller waits for
            stop_string = sequence.detokenizer.update(item.new_token_ids, item.finish_reason)
            sequence.add_logprobs(item.new_logprobs)
            sequence.finish_reason, sequence.stop_reason = item.finish_reason, item.stop_reason
            if stop_string is not None:
                sequence.finish_reason, sequence.stop_reason = "stop", stop_string
                if not item.finished:
                    to_abort.append(item.request_id)
            state.error = state.error or item.error
            self._update_metrics(state, sequence, item)
            if sequence.finish_reason is not None:
                del self.sequences[item.request_id]
            touched[state.request_id] = state
        return [self._take_output(state) for state in touched.values()], to_abort

    def _take_output(self, state: _RequestState) -> RequestOutput:
        if state.is_finished:
            del self.states[state.request_id]
        return state.make_output()

    def sequence_ids(self, request_ids: Iterable[str]) -> list[str]:
        """Ids of all sequences of the named requests; unknown requests are ignored."""
        known = (self.states[request_id] for request_id in request_ids if request_id in self.states)
        return [sequence_id for state in known for sequence_id in state.sequence_ids]

    def abort_requests(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Forget requests; returns their last outputs. Sequences that had not ended get the finish reason `abort`.
        Unknown ids are ignored."""
        outputs = []
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is None:
                continue
            for sequence_id, sequence in zip(state.sequence_ids, state.sequences, strict=True):
                if self.sequences.pop(sequence_id, None) is not None:
                    sequence.detokenizer.update((), "abort")
                    sequence.finish_reason = "abort"
            state.metrics.latency_s = time.perf_counter() - state.arrived
            outputs.append(self._take_output(state))
        return outputs

    def _update_metrics(self, state: _RequestState, sequence: _Sequence, item: EngineCoreOutput) -> None:
        metrics = state.metrics
        elapsed = time.perf_counter() - state.arrived
        if metrics.ttft_s is None and item.new_token_ids:
            metrics.ttft_s = elapsed
        if item.new_token_ids or item.finished:
            metrics.latency_s = elapsed
        metrics.num_output_tokens = sum(len(s.detokenizer.token_ids) for s in state.sequences)
        metrics.num_cached_tokens = item.num_cached_tokens
        sequence.num_preemptions = item.num_preemptions
        metrics.num_preemptions = sum(s.num_preemptions for s in state.sequences)
