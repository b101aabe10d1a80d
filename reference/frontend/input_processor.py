"""From what a user passes to what the engine core accepts: tokenized, validated, seeded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reference.contracts.config import EngineConfig
from reference.contracts.noise import derive_seed
from reference.contracts.request import EngineCoreRequest
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class InputProcessor:
    """Checks and tokenizes prompts. Everything it refuses is a ValueError of one sentence."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.num_arrivals = 0

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> tuple[EngineCoreRequest, str | None]:
        """The request for the engine core, and the prompt's text (None when it came as token ids)."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}.")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}.")
        text, token_ids, salt = self._parse(prompt)
        self._check_token_ids(token_ids, params)
        salt = salt if cache_salt is None else cache_salt
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ValueError(f"cache_salt must be a non-empty string, got {salt!r}.")
        seed = derive_seed(self.config.seed, self.num_arrivals) if params.seed is None else params.seed % 2**64
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            sampling_params=params,
            seed=seed,
            arrival=(self.num_arrivals, 0),
            eos_token_ids=frozenset(self.config.model.eos_token_ids),
            priority=priority,
            cache_salt=salt,
        )
        self.num_arrivals += 1  # only now: a refused prompt must not change the seeds of those after it
        return request, text

    def _parse(self, prompt: Prompt) -> tuple[str | None, Sequence[int], str | None]:
        """(text, token ids, salt) of any accepted form."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt), None
        if isinstance(prompt, Mapping):
            unknown = sorted(set(prompt) - set(_PROMPT_KEYS))
            if unknown:
                raise ValueError(f"Unknown key {unknown[0]!r} in a prompt; known are {', '.join(_PROMPT_KEYS)}.")
            if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise ValueError("A prompt needs either 'prompt' or 'prompt_token_ids'.")
            text, token_ids, _ = self._parse(prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"])
            if (text is None) == ("prompt" in prompt):
                raise ValueError("In a prompt, 'prompt' must be text and 'prompt_token_ids' a list of integers.")
            return text, token_ids, prompt.get("cache_salt")
        if isinstance(prompt, list | tuple):
            return None, prompt, None
        raise ValueError(f"A prompt must be text, a list of token ids or a dict, got {type(prompt).__name__}.")

    def _check_token_ids(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        vocab_size = self.config.model.vocab_size
        for name, ids in (("prompt", token_ids), ("stop_token_ids", params.stop_token_ids)):
            for token_id in ids:
                if isinstance(token_id, bool) or not isinstance(token_id, int):
                    raise ValueError(f"A token id in the {name} must be an integer, got {token_id!r}.")
                if not 0 <= token_id < vocab_size:
                    raise ValueError(
                        f"Token id {token_id} in the {name} is outside the vocabulary of {vocab_size} tokens."
                    )
        if not token_ids:
            raise ValueError("The prompt is empty; give at least one token.")
        max_model_len = self.config.scheduler.max_model_len
        if len(token_ids) >= max_model_len:
            raise ValueError(
                f"The prompt has {len(token_ids)} tokens, but max_model_len is {max_model_len} and at least one token must "
                f"be left to generate; shorten the prompt or raise max_model_len."
            )
