"""What the endpoints do, between HTTP and the engine: see `app` for their addresses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.async_engine import AsyncLLM
from reference.frontend.core_client import EngineDeadError
from reference.frontend.server.answer import Answer
from reference.frontend.server.args import ServerArgs
from reference.frontend.server.body import read_body
from reference.frontend.server.chat import ChatAnswer
from reference.frontend.server.completions import CompletionAnswer
from reference.frontend.server.errors import APIError, bad_request
from reference.frontend.server.generation import Generation, engine_is_dead
from reference.frontend.server.metrics import ServerMetrics
from reference.frontend.server.middleware import KeyRing
from reference.frontend.server.prompts import (
    PromptInput,
    chat_max_tokens,
    chat_prompt,
    check_length,
    completion_prompts,
    sampling_params,
    text_prompt,
)
from reference.frontend.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from reference.frontend.server.streaming import (
    DONE,
    EventStream,
    event,
    unless_disconnected,
    with_signs_of_life,
)
from reference.frontend.trace_file import FORMAT, VERSION


class Service:
    """The endpoints of one engine.

    Args:
        engine: serves the requests.
        args: options of the server.
        model: the name clients use.
        keys: the API keys, for the salts.
        metrics: counts what is asked for.
    """

    def __init__(
        self, engine: AsyncLLM, args: ServerArgs, model: str, keys: KeyRing, metrics: ServerMetrics
    ) -> None:
        self.engine = engine
        self.args = args
        self.limits = args.limits
        self.model = model
        self.keys = keys
        self.metrics = metrics
        self.created = int(time.time())

    async def completions(self, http: Request) -> Response:
        request = await read_body(http, CompletionRequest, self.limits.max_json_depth)
        self._admit(request)
        params = sampling_params(request, self.limits)
        prompts = await completion_prompts(request, self.engine, self.limits)
        max_tokens = params.max_tokens
        if request.echo and request.max_tokens == 0 and params.prompt_logprobs is None:
            return await self._echo(http, request, prompts)
        for prompt in prompts:
            check_length(prompt, max_tokens, self.engine, "max_tokens")
        answer = CompletionAnswer(request, self._name(http), self.model, prompts, self.engine.tokenizer)
        return await self._generate(http, request, params, answer)

    async def _echo(self, http: Request, request: CompletionRequest, prompts: list[PromptInput]) -> Response:
        """The prompt alone: checked as any other, but nothing is generated."""
        for prompt in prompts:
            try:
                self.engine.input_processor.check_prompt(prompt.token_ids)
            except ValueError as error:
                raise bad_request(error, CompletionRequest.model_fields) from None
        answer = CompletionAnswer(request, self._name(http), self.model, prompts, self.engine.tokenizer)
        content = answer.echo()
        if not request.stream:
            return JSONResponse(content)

        async def events() -> AsyncGenerator[str, None]:
            for chunk in answer.echo_chunks(content):
                yield event(chunk)
            yield DONE

        return EventStream(events(), lambda: None)

    async def chat_completions(self, http: Request) -> Response:
        request = await read_body(http, ChatCompletionRequest, self.limits.max_json_depth)
        self._admit(request)
        params = sampling_params(request, self.limits)
        if request.chat_template is not None and not self.args.trust_request_chat_template:
            raise APIError(
                400,
                "'chat_template' is not supported: the server was started without --trust-request-chat-template.",
                "chat_template",
            )
        prompt = await chat_prompt(
            request.messages, self.engine, request.add_generation_prompt, request.chat_template
        )
        check_length(prompt, chat_max_tokens(request), self.engine, "max_tokens")
        answer = ChatAnswer(request, self._name(http), self.model, [prompt], self.engine.tokenizer)
        return await self._generate(http, request, params, answer)

    def _admit(self, request: GenerationRequest) -> None:
        """Refuse early what need not be tokenized."""
        self._check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise APIError(400, "stream_options needs stream to be true.", "stream_options")
        self.check_health()
        self._check_queue(1)

    def _check_queue(self, count: int) -> None:
        """Whether `count` more requests may enter the engine."""
        if self.engine.num_unfinished_requests + count > self.limits.max_queue_len:
            raise APIError(
                429,
                f"No more than {self.limits.max_queue_len} requests may wait or run; try again later.",
                headers={"Retry-After": "1"},
            )

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self.model):
            raise APIError(404, f"This server has no such model; it serves {self.model!r}.", "model")

    def check_health(self) -> None:
        try:
            self.engine.check_health()
        except EngineDeadError as error:
            raise engine_is_dead(error) from None

    @staticmethod
    def _name(http: Request) -> str:
        return str(http.scope["state"]["request_id"])

    def _salt(self, http: Request, request: GenerationRequest) -> str | None:
        of_key = self.keys.salt(http.scope["state"]["key"])
        return request.cache_salt if of_key is None else of_key + (request.cache_salt or "")

    async def _generate(
        self, http: Request, request: GenerationRequest, params: SamplingParams, answer: Answer
    ) -> Response:
        generation = Generation(self.engine, self._name(http), answer.prompts)
        log: dict[str, Any] = http.scope["state"]["log"]
        if request.user is not None:
            log["user"] = request.user

        def end() -> None:
            generation.abort()
            usage = generation.usage()
            log.update(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)

        try:
            await self.engine.prepare(params)
        except ValueError as error:
            raise bad_request(error, type(request).model_fields) from None
        self._check_queue(len(answer.prompts))  # once more: others have come while the prompt was tokenized
        kind: Any = "delta" if request.stream else "final"
        generation.start(request, params, kind, self._salt(http, request))
        for _ in answer.prompts:
            self.metrics.count_params(params)
        if request.stream:
            return EventStream(answer.stream(generation), end)
        try:
            outputs = await unless_disconnected(http, generation.results())
        finally:
            end()
        return JSONResponse(answer.whole(outputs, generation))

    async def tokenize(self, http: Request) -> Response:
        request = await read_body(http, TokenizeRequest, self.limits.max_json_depth)
        self._check_model(request.model)
        engine = self.engine
        if request.messages is not None:
            prompt = await chat_prompt(request.messages, engine, request.add_generation_prompt)
        else:
            prompt = await text_prompt(request.prompt or "", engine, request.add_special_tokens)
        token_ids = prompt.token_ids
        decode = engine.tokenizer.decode
        content = {
            "count": len(token_ids),
            "max_model_len": engine.config.scheduler.max_model_len,
            "tokens": token_ids,
            "token_strs": [decode([i], False) for i in token_ids] if request.return_token_strs else None,
        }
        return JSONResponse(content)

    async def detokenize(self, http: Request) -> Response:
        request = await read_body(http, DetokenizeRequest, self.limits.max_json_depth)
        self._check_model(request.model)
        try:
            text = await asyncio.to_thread(self.engine.tokenizer.decode, request.tokens, False)
        except ValueError as error:
            raise APIError(400, str(error), "tokens") from None
        return JSONResponse({"prompt": text})

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.model_card(self.model)]}

    def model_card(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "twinfer",
            "root": self.model,
            "parent": None,
            "max_model_len": self.engine.config.scheduler.max_model_len,
        }

    async def reset_prefix_cache(self) -> Response:
        self.check_health()
        try:
            was_reset = await self.engine.reset_prefix_cache()
        except EngineDeadError as error:
            raise engine_is_dead(error) from None
        if not was_reset:
            raise APIError(503, "The prefix cache is in use; try again when no request is running.")
        return Response()

    def trace_steps(self) -> Response:
        """Every step from now on as an event; the first event says what engine it is."""
        self.check_health()
        config = self.engine.config
        head = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "tier": self.engine.tier_name,
            "block_size": config.cache.block_size,
            "num_blocks": config.cache.num_blocks,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
            "max_model_len": config.scheduler.max_model_len,
        }

        async def events() -> AsyncGenerator[str, None]:
            try:
                with self.engine.watch_steps() as steps:
                    yield event(head)
                    async for step in steps:
                        yield f"data: {step}\n\n"
                self.engine.check_health()
            except EngineDeadError as error:
                yield event(engine_is_dead(error).content())
            yield DONE

        return EventStream(with_signs_of_life(events()), lambda: None)
