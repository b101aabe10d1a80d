"""What both generating endpoints share: the frame of an answer, and its stream of events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from reference.frontend.outputs import CompletionOutput, RequestOutput
from reference.frontend.server.errors import APIError
from reference.frontend.server.generation import Generation
from reference.frontend.server.logprobs import CompletionLogprobs
from reference.frontend.server.prompts import PromptInput
from reference.frontend.server.protocol import GenerationRequest
from reference.frontend.server.streaming import DONE, event
from reference.frontend.tokenizer import Tokenizer


class Answer(ABC):
    """Turns outputs of the engine into the JSON of one endpoint; remembers what a stream has already said."""

    object_name: str
    stream_object_name: str
    id_prefix: str
    is_echo_alone = False  # nothing that was generated is shown

    def __init__(
        self,
        request: GenerationRequest,
        name: str,
        model: str,
        prompts: Sequence[PromptInput],
        tokenizer: Tokenizer,
    ) -> None:
        self.request = request
        self.name = name
        self.model = model
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.n = request.n or 1
        self.created = int(time.time())
        self.logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        options = request.stream_options
        self.wants_usage = options is not None and options.include_usage
        self.wants_continuous_usage = options is not None and options.continuous_usage_stats

    @abstractmethod
    def choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """A finished choice; `index` is the prompt's."""

    @abstractmethod
    def chunk_choices(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[dict[str, Any]]:
        """What a stream says of a sequence in which something is new."""

    def is_first(self, number: int) -> bool:
        """Whether this is the first that is said of a choice."""
        is_first = number not in self._begun
        self._begun.add(number)
        return is_first

    def head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self.name}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def whole(self, outputs: Sequence[RequestOutput], generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self.choice(index, output, completion)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return self.head(self.object_name) | {"choices": choices, "usage": self._usage(generation)}

    def _usage(self, generation: Generation) -> dict[str, Any]:
        usage = generation.usage()
        if self.is_echo_alone:
            usage.completion_tokens = 0
        return usage.render()

    async def stream(self, generation: Generation) -> AsyncGenerator[str, None]:
        """The answer as events. An error becomes an event too: a stream always ends with `[DONE]`."""
        head = self.head(self.stream_object_name)
        try:
            async for index, output in generation.outputs():
                for completion in output.outputs:
                    for choice in self.chunk_choices(index, output, completion):
                        chunk = head | {"choices": [choice]}
                        if self.wants_continuous_usage:
                            chunk["usage"] = self._usage(generation)
                        yield event(chunk)
            if self.wants_usage:
                yield event(head | {"choices": [], "usage": self._usage(generation)})
        except APIError as error:
            yield event(error.content())
        yield DONE
