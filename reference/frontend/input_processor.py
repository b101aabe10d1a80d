"""From what a user passes to what the engine core accepts: tokenized, validated, seeded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reference.contracts.config import EngineConfig
from reference.contracts.logits import masked_token_ids, unpack_bitmask
from reference.contracts.noise import derive_seed
from reference.contracts.request import EngineCoreRequest
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.structured_output import GrammarCompiler

if TYPE_CHECKING:
    from reference.frontend.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt")


class _Parsed(NamedTuple):
    """A prompt of any accepted form."""

    text: str | None
    token_ids: Sequence[int]
    embeds: np.ndarray | None  # float32 [P, C]; the token ids then only hold the places
    salt: object


class InputProcessor:
    """Checks and tokenizes prompts. Everything it refuses is a ValueError of one sentence, and it keeps no state."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, grammars: GrammarCompiler | None = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.grammars = grammars or GrammarCompiler(config.model, tokenizer)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival_number: int,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> tuple[EngineCoreRequest, str | None]:
        """Make a request for the engine core.

        Args:
            request_id: names the request in all later calls.
            prompt: text, token ids, or a dict with either; a dict with both takes the ids, and the text is for display.
                Or a dict with `prompt_embeds`, an array [P, hidden size] of vectors in place of the tokens'; it is
                copied, and a text beside it is for display.
            params: what to generate.
            arrival_number: how many requests the engine accepted before; gives the order, and the seed if
                `params` has none.
            priority: smaller runs first, under the priority policy.
            cache_salt: only requests with the same salt share KV blocks; excludes a salt in the prompt's dict.

        Returns:
            The request, and the prompt's text (None when it came as token ids alone).

        Raises:
            ValueError: anything above is not acceptable.
        """
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty string, got {request_id!r:.100}.")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}.")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r:.100}.")
        text, token_ids, embeds, salt = self._parse(prompt)
        if salt is not None and cache_salt is not None:
            raise ValueError("cache_salt is given twice, in the prompt and beside it; give only one.")
        if embeds is not None and params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs needs a prompt of tokens; leave it out with prompt_embeds.")
        params = self._resolve(params)
        seed = derive_seed(self.config.seed, arrival_number) if params.seed is None else params.seed % 2**64
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tuple(self.check_prompt(token_ids)),
            sampling_params=params,
            seed=seed,
            arrival=(arrival_number, 0),
            eos_token_ids=frozenset(self.config.model.eos_token_ids),
            priority=priority,
            cache_salt=_check_salt(salt if cache_salt is None else cache_salt),
            prompt_embeds=embeds,
        )
        return request, text

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        """Check the token ids of the parameters, and add what the model and its tokenizer know."""
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_token_ids("logit_bias", tuple(params.logit_bias))
        words = [ids for word in params.bad_words for ids in self._spellings(word)]
        for ids in words:
            self._check_token_ids("bad_words", ids)
        params = params.resolved(self.config.model.eos_token_ids, words)
        vocab_size = self.config.model.vocab_size
        allowed = range(vocab_size) if params.allowed_token_ids is None else set(params.allowed_token_ids)
        if params.structured_outputs is not None:
            bitmask = self.grammars.compile(params.structured_outputs).bitmask(())[0]
            allowed = set(np.flatnonzero(unpack_bitmask(bitmask, vocab_size)).tolist()).intersection(allowed)
        masked = masked_token_ids(params, ())  # more can only come from the tail of a bad word
        if all(token_id in masked for token_id in allowed):
            also = "" if params.structured_outputs is None else "structured_outputs, "
            raise ValueError(
                f"{also}allowed_token_ids, bad_words and min_tokens together leave no token to generate; allow more "
                f"tokens."
            )
        return params

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """A word's tokens at the beginning of a text, and behind a space where these are others."""
        word = _check_text("A word in bad_words", word).lstrip()
        spellings = [tuple(self.tokenizer.encode_word(text)) for text in (word, f" {word}")]
        return [ids for ids in dict.fromkeys(spellings) if ids]

    def _parse(self, prompt: Prompt) -> _Parsed:
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        elif isinstance(prompt, list | tuple):
            prompt = {"prompt_token_ids": prompt}
        elif not isinstance(prompt, Mapping):
            raise ValueError(
                f"A prompt must be text, a list of token ids or a dict, got {type(prompt).__name__}."
            )
        unknown = [key for key in prompt if key not in PROMPT_KEYS]
        if unknown:
            raise ValueError(
                f"Unknown key {unknown[0]!r:.100} in a prompt; known are {', '.join(PROMPT_KEYS)}."
            )
        text, token_ids, embeds, salt = (prompt.get(key) for key in PROMPT_KEYS)  # null means absent
        if text is not None:
            text = _check_text("The prompt", text)
        if embeds is not None:
            if token_ids is not None:
                raise ValueError(
                    "A prompt has 'prompt_token_ids' or 'prompt_embeds', not both; give only one."
                )
            embeds = _as_embeds(embeds, self.config.model.hidden_size)
            return _Parsed(text, [0] * len(embeds), embeds, salt)
        if token_ids is None:
            if text is None:
                raise ValueError("A prompt needs 'prompt' (text), 'prompt_token_ids' or 'prompt_embeds'.")
            token_ids = self.tokenizer.encode(text)
        elif not isinstance(token_ids, list | tuple):
            raise ValueError(f"prompt_token_ids must be a list of integers, got {type(token_ids).__name__}.")
        return _Parsed(text, token_ids, None, salt)

    def check_prompt(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The prompt as it is. Raises ValueError when it is empty, too long, or holds ids outside the vocabulary."""
        if not token_ids:
            raise ValueError("The prompt is empty; give at least one token.")
        max_model_len = self.config.scheduler.max_model_len
        if len(token_ids) >= max_model_len:
            raise ValueError(
                f"The prompt has {len(token_ids)} tokens, but max_model_len is {max_model_len} and at least one token "
                f"must be left to generate; shorten the prompt or raise max_model_len."
            )
        self._check_token_ids("the prompt", token_ids)
        return token_ids

    def _check_token_ids(self, where: str, token_ids: Sequence[int]) -> None:
        """The model's vocabulary counts, not the tokenizer's: models have rows for tokens added later."""
        vocab_size = self.config.model.vocab_size
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ValueError(f"A token id in {where} must be an integer, got {token_id!r:.100}.")
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"Token id {token_id} in {where} is outside the vocabulary of {vocab_size} tokens."
                )


def _as_embeds(value: Any, hidden_size: int) -> np.ndarray:
    """Any floating-point array [P, hidden size] as float32 of our own: the caller may do with theirs what they like."""
    if not hasattr(value, "__array__") and not hasattr(value, "__dlpack__"):
        raise ValueError(
            f"prompt_embeds must be an array of NumPy, torch or the like, got {type(value).__name__}; pass one of "
            f"shape [tokens, {hidden_size}]."
        )
    if callable(getattr(value, "detach", None)):
        value = value.detach()  # a tensor on its way to a gradient is not given out otherwise
    try:
        array = np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
    except Exception as error:  # somebody else's code: it may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"prompt_embeds cannot be read ({reason:.200}); pass a float32 array that is in the CPU's memory."
        ) from error
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"prompt_embeds must be floating-point numbers, got {array.dtype}; pass float32.")
    if array.ndim != 2 or array.shape[1] != hidden_size:
        raise ValueError(
            f"prompt_embeds must have the shape [tokens, {hidden_size}] (the model's hidden size), got "
            f"{list(array.shape)}."
        )
    with np.errstate(over="ignore"):
        embeds = np.array(array, dtype=np.float32, order="C")  # [P, C], a copy
    if not np.isfinite(embeds).all():
        raise ValueError("prompt_embeds must be finite numbers in float32; remove NaN and infinity.")
    return embeds


def _check_salt(salt: object) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise ValueError(f"cache_salt must be a non-empty string, got {salt!r:.100}.")
    return _check_text("cache_salt", salt)


def _check_text(what: str, text: object) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{what} must be text, got {type(text).__name__}.")
    try:
        text.encode()  # half a surrogate pair has no UTF-8: tokenizer and hash would raise in the middle of things
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} is no valid text: character {error.start} is half of a surrogate pair."
        ) from None
    return text
