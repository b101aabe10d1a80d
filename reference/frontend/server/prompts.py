"""From a checked request to what the engine takes: prompts as token ids, `SamplingParams`, and the server's limits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from reference.contracts.sampling_params import SamplingParams
from reference.contracts.structured_outputs import StructuredOutputsParams
from reference.frontend.async_engine import AsyncLLM
from reference.frontend.server.args import Limits
from reference.frontend.server.errors import APIError, bad_request
from reference.frontend.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
)

DEFAULT_MAX_TOKENS = 16  # of a completion, as at OpenAI; a chat goes on until the maximum length


@dataclass(frozen=True)
class PromptInput:
    """One prompt: its ids, and its text if it came as text."""

    token_ids: list[int]
    text: str | None


async def completion_prompts(
    request: CompletionRequest, engine: AsyncLLM, limits: Limits
) -> list[PromptInput]:
    """The prompts of a completion request. Raises APIError: none, an empty one, or too many."""
    content = request.prompt
    if isinstance(content, str):
        texts: list[str | list[int]] = [content]
    elif content and isinstance(content[0], int):
        texts = [[token for token in content if isinstance(token, int)]]
    else:
        texts = [item for item in content if not isinstance(item, int)]
    if not texts:
        raise APIError(400, "The prompt is empty; give at least one.", "prompt")
    if len(texts) * (request.n or 1) > limits.max_sequences:
        raise APIError(
            400,
            f"{len(texts)} prompts times n = {request.n or 1} exceed {limits.max_sequences} completions; send several "
            f"requests.",
            "n",
        )
    return [
        await text_prompt(text, engine, request.add_special_tokens)
        if isinstance(text, str)
        else PromptInput(text, None)
        for text in texts
    ]


async def text_prompt(text: str, engine: AsyncLLM, add_special_tokens: bool) -> PromptInput:
    """A text, tokenized in a thread. Raises APIError when it cannot fit."""
    _check_length(text, engine, "prompt")
    tokenizer = engine.tokenizer
    encode = tokenizer.encode if add_special_tokens else tokenizer.encode_word
    return PromptInput(await asyncio.to_thread(encode, text), text)


async def chat_prompt(
    messages: Sequence[Message],
    engine: AsyncLLM,
    add_generation_prompt: bool,
    chat_template: str | None = None,
) -> PromptInput:
    """A conversation through the chat template, the model's unless given. Raises APIError when it refuses."""
    texts = [message.as_text() for message in messages]
    for text in texts:
        _check_length(text["content"], engine, "messages")

    def render() -> PromptInput:
        prompt = engine.tokenizer.apply_chat_template(texts, add_generation_prompt, chat_template)
        return PromptInput(engine.tokenizer.encode_word(prompt), prompt)

    try:
        return await asyncio.to_thread(render)
    except ValueError as error:
        raise APIError(400, str(error), "messages") from None


def _check_length(text: str, engine: AsyncLLM, param: str) -> None:
    """Refuse a text that cannot fit before it is tokenized: no token is longer than the longest of the vocabulary."""
    limit = engine.config.scheduler.max_model_len
    if len(text) > limit * engine.tokenizer.longest_token:
        raise APIError(
            400,
            f"The prompt has {len(text)} characters, which cannot fit into max_model_len = {limit} tokens; shorten it.",
            param,
        )


def check_length(prompt: PromptInput, max_tokens: int | None, engine: AsyncLLM, param: str) -> None:
    """Prompt and answer together must fit. Raises APIError that states both lengths."""
    limit, num_tokens = engine.config.scheduler.max_model_len, len(prompt.token_ids)
    if max_tokens is not None and max_tokens > 0 and num_tokens < limit < num_tokens + max_tokens:
        raise APIError(
            400,
            f"The prompt has {num_tokens} tokens and max_tokens is {max_tokens}: together more than max_model_len = "
            f"{limit}; lower max_tokens to {limit - num_tokens} or shorten the prompt.",
            param,
        )


def sampling_params(request: GenerationRequest, limits: Limits) -> SamplingParams:
    """Raises APIError when a value is out of range or beyond a limit."""
    _check_limits(request, limits)
    options = request.sampling_options()
    if isinstance(request, CompletionRequest):
        max_tokens: int | None = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        options["logprobs"] = request.logprobs
        if request.echo:
            if max_tokens == 0:
                max_tokens = 1  # it is generated for the logprobs of the prompt, and not shown
            if request.logprobs is not None and request.prompt_logprobs is None:
                options["prompt_logprobs"] = request.logprobs
    else:
        assert isinstance(request, ChatCompletionRequest)
        max_tokens = chat_max_tokens(request)
        options["logprobs"] = _chat_logprobs(request)
    if request.stream and request.prompt_logprobs is not None:
        raise APIError(400, "'prompt_logprobs' is not supported in a stream.", "prompt_logprobs")
    options["structured_outputs"] = _structured_outputs(request)
    try:
        return SamplingParams(max_tokens=max_tokens, **options)
    except ValueError as error:
        raise bad_request(error, type(request).model_fields) from None


def _structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    tables = request.structured_tables()
    if not tables:
        return None
    if len(tables) > 1:
        raise APIError(
            400, f"{' and '.join(tables)} constrain the output in several ways; give one.", next(iter(tables))
        )
    ((field, table),) = tables.items()
    try:
        return StructuredOutputsParams.from_json(table)
    except ValueError as error:
        raise APIError(400, str(error), field) from None


def chat_max_tokens(request: ChatCompletionRequest) -> int | None:
    both = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(both) > 1:
        raise APIError(400, "max_tokens and max_completion_tokens differ; give one of them.", "max_tokens")
    return next(iter(both), None)


def _chat_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise APIError(400, "top_logprobs needs logprobs to be true.", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _check_limits(request: GenerationRequest, limits: Limits) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    for name, values, most in (
        ("stop", stops, limits.max_stops),
        ("bad_words", request.bad_words or [], limits.max_bad_words),
        ("logit_bias", request.logit_bias or {}, limits.max_logit_bias),
        ("stop_token_ids", request.stop_token_ids or [], limits.max_token_ids),
        ("allowed_token_ids", request.allowed_token_ids or [], limits.max_token_ids),
    ):
        if len(values) > most:
            raise APIError(400, f"{name} has {len(values)} entries; at most {most} are allowed.", name)
    for name, words in (("stop", stops), ("bad_words", request.bad_words or [])):
        if any(len(word) > limits.max_stop_characters for word in words):
            raise APIError(
                400, f"An entry of {name} is longer than {limits.max_stop_characters} characters.", name
            )
        if any(not word.strip() if name == "bad_words" else not word for word in words):
            raise APIError(400, f"An entry of {name} is empty.", name)
    for key in request.logit_bias or {}:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise APIError(400, "A key of logit_bias is no token id.", "logit_bias")
    if (request.n or 1) > limits.max_sequences:
        raise APIError(400, f"n must be at most {limits.max_sequences}, got {request.n}.", "n")
