"""What a user may ask of one request. Names, defaults and ranges are vLLM's (`vllm/sampling_params.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_N = 64  # sequences of one request
GREEDY_TEMPERATURE = 1e-5  # below this, dividing the logits could overflow: the row is greedy


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}.")


def _require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}.")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Args:
        n: sequences to generate from one prompt, 1 to 64; sequence i draws with `seed + i`.
        temperature: 0 (or below 1e-5) is greedy; otherwise logits are divided by it.
        top_p: in (0, 1]; keep the smallest set of tokens whose probability reaches it.
        top_k: keep the k best tokens; 0 or -1 keeps all.
        seed: 64-bit seed of the request's draws; `None` derives one from the engine's seed and the arrival number.
        max_tokens: tokens to generate at most; `None` means until the maximum length.
        stop: strings that end the output when they appear in the text; the text is cut before them.
        stop_token_ids: token ids that end the output; the id stays in `token_ids` and is not in the text.
        ignore_eos: go on past end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string, or the stop token, in the text.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: a value is out of range or of the wrong type; the sentence names the parameter.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    _stop_token_set: frozenset[int] = field(init=False, repr=False, compare=False, default=frozenset())

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
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens)
            if self.max_tokens < 1:
                raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.seed is not None:
            _require_int("seed", self.seed)
            if not -(2**63) <= self.seed < 2**64:
                raise ValueError(f"seed must fit into 64 bits, got {self.seed}.")
        self._normalise_stops()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")

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

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` after normalisation: always a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    def is_stop_token(self, token_id: int) -> bool:
        return token_id in self._stop_token_set
