"""What a user may ask of one request. Names, defaults and ranges are vLLM's (`vllm/sampling_params.py`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reference.contracts.structured_outputs import StructuredOutputsParams

MAX_N = 64  # sequences of one request
MAX_LOGPROBS = 20
GREEDY_TEMPERATURE = 1e-5  # below this, dividing the logits could overflow: the row is greedy


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}.")


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}.")


def _require_range(name: str, value: object, low: float, high: float) -> None:
    _require_number(name, value)
    assert isinstance(value, int | float)
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {value!r}.")


def _require_num_logprobs(name: str, value: int | None) -> None:
    if value is not None:
        _require_int(name, value)
        if not 0 <= value <= MAX_LOGPROBS:
            raise ValueError(f"{name} must be from 0 to {MAX_LOGPROBS}, got {value}.")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Args:
        n: sequences to generate from one prompt, 1 to 64; sequence i draws with `seed + i`.
        temperature: 0 (or below 1e-5) is greedy; otherwise logits are divided by it.
        top_p: in (0, 1]; keep the smallest set of tokens whose probability reaches it.
        top_k: keep the k best tokens; 0 or -1 keeps all.
        min_p: in [0, 1]; drop tokens less likely than this fraction of the most likely one's probability.
        repetition_penalty: above 0; positive logits of tokens in prompt or output are divided by it, others multiplied.
        presence_penalty: in [-2, 2]; subtracted once from the logit of each token in the output.
        frequency_penalty: in [-2, 2]; subtracted as often as the token is in the output.
        logit_bias: token id -> number added to its logit; cut to [-100, 100], as in vLLM's API.
        allowed_token_ids: nothing but these tokens; `None` allows all.
        bad_words: words that never appear in the output, at the start of a text or behind a space.
        logprobs: so many of the most probable tokens are reported at each position, beside the sampled one; 0 reports
            the sampled one alone, `None` none. Of the raw logits, before anything above changes them.
        prompt_logprobs: the same for each token of the prompt but the first, which nothing stands before. Such a
            request computes its whole prompt: it never reads the prefix cache.
        seed: 64-bit seed of the request's draws; `None` derives one from the engine's seed and the arrival number.
        max_tokens: tokens to generate at most; `None` means until the maximum length.
        min_tokens: so many tokens are generated before end-of-sequence, a stop token id or a stop string may end
            the output.
        stop: strings that end the output when they appear in the text; the text is cut before them.
        stop_token_ids: token ids that end the output; the id stays in `token_ids` and is not in the text.
        ignore_eos: go on past end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string, or the stop token, in the text.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: what the whole text must be: JSON of a schema, a match of a regular expression, one of some
            choices, a sentence of a grammar.

    Raises:
        ValueError: a value is out of range or of the wrong type; the sentence names the parameter.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    _stop_token_set: frozenset[int] = field(init=False, repr=False, compare=False, default=frozenset())
    _all_stop_token_ids: frozenset[int] = field(init=False, repr=False, compare=False, default=frozenset())
    _bad_words_token_ids: tuple[tuple[int, ...], ...] = field(
        init=False, repr=False, compare=False, default=()
    )

    def __post_init__(self) -> None:
        _require_int("n", self.n)
        if not 1 <= self.n <= MAX_N:
            raise ValueError(f"n must be from 1 to {MAX_N}, got {self.n}.")
        _require_number("temperature", self.temperature)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}.")
        _require_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        _require_int("top_k", self.top_k)
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or 0 (off) or at least 1, got {self.top_k}.")
        self._check_penalties()
        self._check_lengths()
        _require_num_logprobs("logprobs", self.logprobs)
        _require_num_logprobs("prompt_logprobs", self.prompt_logprobs)
        if self.seed is not None:
            _require_int("seed", self.seed)
            if not -(2**63) <= self.seed < 2**64:
                raise ValueError(f"seed must fit into 64 bits, got {self.seed}.")
        self._normalise_stops()
        self._normalise_token_rules()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams, got {self.structured_outputs!r:.100}."
            )

    def _check_penalties(self) -> None:
        _require_range("min_p", self.min_p, 0, 1)
        _require_range("presence_penalty", self.presence_penalty, -2, 2)
        _require_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _require_number("repetition_penalty", self.repetition_penalty)
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty must be a finite number above 0, got {self.repetition_penalty}."
            )

    def _check_lengths(self) -> None:
        _require_int("min_tokens", self.min_tokens)
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}.")
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens)
            if self.max_tokens < 1:
                raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}."
                )

    def _normalise_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be a non-empty string or a list of them, got {self.stop!r}.")
        ids = self.stop_token_ids
        if not isinstance(ids, list | tuple):
            raise ValueError(f"stop_token_ids must be a list of integers, got {ids!r}.")
        for token_id in ids:
            _require_int("stop_token_ids", token_id)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        object.__setattr__(self, "_stop_token_set", frozenset(ids))
        object.__setattr__(self, "_all_stop_token_ids", frozenset(ids))

    def _normalise_token_rules(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is not None:
            if not isinstance(allowed, list | tuple) or not allowed:
                raise ValueError(
                    f"allowed_token_ids must be a list of at least one integer, got {allowed!r}."
                )
            for token_id in allowed:
                _require_int("allowed_token_ids", token_id)
            object.__setattr__(self, "allowed_token_ids", tuple(allowed))
        words = self.bad_words
        if not isinstance(words, list | tuple) or not all(isinstance(w, str) and w.strip() for w in words):
            raise ValueError(f"bad_words must be a list of words that are more than spaces, got {words!r}.")
        object.__setattr__(self, "bad_words", tuple(words))
        object.__setattr__(self, "logit_bias", _normalised_bias(self.logit_bias))

    def resolved(
        self, eos_token_ids: Iterable[int], bad_words_token_ids: Iterable[Iterable[int]]
    ) -> SamplingParams:
        """A copy that knows what only model and tokenizer can tell: the ids that end, and those of bad words."""
        params = copy.copy(self)
        object.__setattr__(params, "_all_stop_token_ids", self._stop_token_set | frozenset(eos_token_ids))
        object.__setattr__(params, "_bad_words_token_ids", tuple(tuple(word) for word in bad_words_token_ids))
        return params

    def for_drafts(self) -> SamplingParams:
        """A copy that draws the same tokens and reports nothing about them: what a draft model guesses with."""
        params = copy.copy(self)
        object.__setattr__(params, "logprobs", None)
        object.__setattr__(params, "prompt_logprobs", None)
        return params

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` after normalisation: always a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def all_stop_token_ids(self) -> frozenset[int]:
        """What `min_tokens` masks: stop token ids and, once `resolved`, the model's end-of-sequence ids."""
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Every spelling of every bad word; empty until `resolved`."""
        return self._bad_words_token_ids

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """A token whose K and V come from the cache gives no row of logits (vLLM's name)."""
        return self.prompt_logprobs is not None

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def changes_logits(self) -> bool:
        """Whether anything happens to a row of logits before temperature."""
        return (
            self.has_penalties
            or self.allowed_token_ids is not None
            or bool(self.bad_words_token_ids or self.logit_bias or self.min_tokens)
        )

    def is_stop_token(self, token_id: int) -> bool:
        return token_id in self._stop_token_set

    def ends_output(self, token_id: int) -> bool:
        """Whether the output ends with this token, once `resolved`: a stop token, or end-of-sequence unless ignored."""
        return token_id in (self._stop_token_set if self.ignore_eos else self._all_stop_token_ids)


def _normalised_bias(bias: object) -> dict[int, float]:
    """Integer keys (JSON knows only text keys), and values cut to the range that vLLM's API cuts to."""
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {bias!r}.")
    normalised = {}
    for token_id, value in bias.items():
        if isinstance(token_id, str) and token_id.isdecimal():
            token_id = int(token_id)
        _require_int("A token id in logit_bias", token_id)
        _require_number("A value in logit_bias", value)
        normalised[token_id] = min(100.0, max(-100.0, float(value)))
    return normalised
