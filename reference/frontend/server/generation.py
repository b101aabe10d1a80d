"""The engine requests behind one HTTP request: one for each prompt, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.async_engine import AsyncLLM
from reference.frontend.core_client import EngineDeadError
from reference.frontend.output_collector import OutputCollector, OutputKind
from reference.frontend.outputs import RequestOutput
from reference.frontend.server.errors import APIError, bad_request
from reference.frontend.server.prompts import PromptInput
from reference.frontend.server.protocol import GenerationRequest


@dataclass
class Usage:
    """Tokens that one HTTP request cost so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def render(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Generation:
    """Runs prompts through the engine. `abort` must be called at the end, however it came."""

    def __init__(self, engine: AsyncLLM, name: str, prompts: Sequence[PromptInput]) -> None:
        self.engine = engine
        self.prompts = prompts
        # The client chose the name, and may use it twice at the same time: the engine gets others.
        unique = token_hex(8)
        self.request_ids = [f"{name}-{unique}-{i}" for i in range(len(prompts))]
        self._collectors: list[OutputCollector] = []
        self._newest: dict[int, RequestOutput] = {}

    def start(
        self, request: GenerationRequest, params: SamplingParams, kind: OutputKind, salt: str | None
    ) -> None:
        """Queue all prompts.

        Raises:
            APIError: one of them is not acceptable; none is left in the engine.
        """
        try:
            for request_id, prompt in zip(self.request_ids, self.prompts, strict=True):
                content = {"prompt_token_ids": prompt.token_ids, "prompt": prompt.text}
                collector = self.engine.add_request(
                    request_id,
                    content,
                    params,
                    priority=request.priority or 0,
                    cache_salt=salt,
                    output_kind=kind,
                )
                self._collectors.append(collector)
        except ValueError as error:
            self.abort()
            raise bad_request(error, type(request).model_fields) from None
        except EngineDeadError as error:
            self.abort()
            raise engine_is_dead(error) from None

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, its next output), as they come.

        Raises:
            APIError: the engine could not finish one of them.
        """
        waiting = {asyncio.ensure_future(c.get()): i for i, c in enumerate(self._collectors)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    index = waiting.pop(task)
                    output = task.result()
                    self._newest[index] = output
                    failure = _failure(output)
                    if failure is not None:
                        yield index, _without_ending(output)
                        raise failure
                    if not output.finished:
                        waiting[asyncio.ensure_future(self._collectors[index].get())] = index
                    yield index, output
        except EngineDeadError as error:
            raise engine_is_dead(error) from None
        finally:
            for task in waiting:
                task.cancel()

    async def results(self) -> list[RequestOutput]:
        """The last outputs, in the order of the prompts."""
        last: dict[int, RequestOutput] = {}
        async for index, output in self.outputs():
            last[index] = output
        return [last[index] for index in range(len(self.prompts))]

    def usage(self) -> Usage:
        metrics = [output.metrics for output in self._newest.values()]
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            completion_tokens=sum(m.num_output_tokens for m in metrics),
            cached_tokens=sum(m.num_cached_tokens for m in metrics),
        )

    def abort(self) -> None:
        self.engine.abort(self.request_ids)


def _failure(output: RequestOutput) -> APIError | None:
    reasons = {completion.finish_reason for completion in output.outputs}
    if "error" in reasons:
        return APIError(500, f"The engine could not finish the request: {output.error}")
    if "abort" in reasons:
        return APIError(503, "The request was aborted: the server is shutting down.")
    return None


def _without_ending(output: RequestOutput) -> RequestOutput:
    """What came before the failure."""
    parts = [replace(c, finish_reason=None) for c in output.outputs if c.token_ids]
    return replace(output, finished=False, outputs=parts)


def engine_is_dead(error: EngineDeadError) -> APIError:
    return APIError(503, f"The engine is not running any more. {error}")
