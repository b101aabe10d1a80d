"""From the engine core's news to `RequestOutput`s: text, stop strings, finish reasons, times."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from reference.contracts.request import EngineCoreRequest
from reference.contracts.schedule import EngineCoreOutput
from reference.frontend.detokenizer import IncrementalDetokenizer
from reference.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from reference.frontend.tokenizer import Tokenizer


class _RequestState:
    """What the front end remembers of one unfinished request."""

    def __init__(self, request: EngineCoreRequest, prompt: str | None, tokenizer: Tokenizer) -> None:
        self.request_id = request.request_id
        self.prompt = prompt
        self.prompt_token_ids = list(request.prompt_token_ids)
        self.detokenizer = IncrementalDetokenizer(tokenizer, request.sampling_params)
        self.metrics = RequestMetrics(num_prompt_tokens=len(self.prompt_token_ids))
        self.arrived = time.perf_counter()

    def make_output(
        self, finish_reason: str | None, stop_reason: int | str | None = None, error: str | None = None
    ) -> RequestOutput:
        delta_text = self.detokenizer.take_delta(finished=finish_reason is not None)
        completion = CompletionOutput(
            index=0,
            text=self.detokenizer.given_text,
            token_ids=list(self.detokenizer.token_ids),
            delta_text=delta_text,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=finish_reason is not None,
            metrics=replace(self.metrics),  # an output that was handed out does not change
            error=error,
        )


class OutputProcessor:
    """Owns the text side of all unfinished requests; a finished one leaves nothing behind."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.states: dict[str, _RequestState] = {}

    def add_request(self, request: EngineCoreRequest, prompt: str | None) -> None:
        self.states[request.request_id] = _RequestState(request, prompt, self.tokenizer)

    def process_outputs(self, news: Iterable[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Returns the outputs, and the ids of requests that a stop string ended: the engine core must abort them."""
        outputs, to_abort = [], []
        for item in news:
            state = self.states.get(item.request_id)
            if state is None:
                continue  # aborted, or ended by a stop string, while its last step ran
            self._update_metrics(state, item)
            stop_string = state.detokenizer.update(item.new_token_ids, item.finish_reason)
            state.metrics.num_output_tokens = len(state.detokenizer.token_ids)
            if stop_string is not None:
                output = state.make_output("stop", stop_string)
                if not item.finished:
                    to_abort.append(item.request_id)
            else:
                output = state.make_output(item.finish_reason, item.stop_reason, item.error)
            outputs.append(output)
            if output.finished:
                del self.states[item.request_id]
        return outputs, to_abort

    def abort_requests(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Forget requests; returns their last outputs, with finish reason `abort`. Unknown ids are ignored."""
        outputs = []
        for request_id in request_ids:
            state = self.states.pop(request_id, None)
            if state is not None:
                state.detokenizer.update((), "abort")
                state.metrics.latency_s = time.perf_counter() - state.arrived
                outputs.append(state.make_output("abort"))
        return outputs

    def _update_metrics(self, state: _RequestState, item: EngineCoreOutput) -> None:
        metrics = state.metrics
        elapsed = time.perf_counter() - state.arrived
        if metrics.ttft_s is None and item.new_token_ids:
            metrics.ttft_s = elapsed
        if item.new_token_ids or item.finished:
            metrics.latency_s = elapsed
        metrics.num_cached_tokens = item.num_cached_tokens
        metrics.num_preemptions = item.num_preemptions
