"""What a caller gets back. Names are vLLM's (`vllm/outputs.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token by the model's raw logits; rank 1 is the most probable."""

    logprob: float
    rank: int
    decoded_token: str  # the token decoded alone: half a character shows as U+FFFD


@dataclass
class CompletionOutput:
    """One generated sequence.

    `text` and `token_ids` are everything so far; `delta_text` is what this output adds to the one before it, so a
    stream is the concatenation of the deltas and nobody has to compare strings.
    """

    index: int
    text: str
    token_ids: list[int]
    delta_text: str = ""
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    # With `SamplingParams.logprobs`: one table a token of `token_ids`, the sampled token first, then by rank.
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None  # sum over the sampled tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """What one request cost. Times are in seconds, counted from its arrival in the engine."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    queue_s: float | None = None  # time in the queue, until it was first admitted
    ttft_s: float | None = None  # time to first token
    latency_s: float | None = None  # time to the last token


@dataclass
class RequestOutput:
    """State of a request after a step; the last one has `finished` set."""

    request_id: str
    prompt: str | None  # None when the prompt came as token ids
    prompt_token_ids: list[int]  # empty when the prompt came as embeddings
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = field(default=None)  # why, when the finish reason is "error"
    # With `SamplingParams.prompt_logprobs`: one table a token of the prompt, this token first, then by rank; None for
    # token 0. Shorter than the prompt only when the request ended before its prompt was computed.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens
