"""POST /v1/completions: the answer in one piece, or as a stream of deltas."""

from __future__ import annotations

from typing import Any

from reference.frontend.outputs import CompletionOutput, RequestOutput
from reference.frontend.server.answer import Answer
from reference.frontend.server.generation import Usage
from reference.frontend.server.logprobs import CompletionLogprobs
from reference.frontend.server.prompts import PromptInput
from reference.frontend.server.protocol import CompletionRequest


class CompletionAnswer(Answer):
    """Choice `i * n + j` is completion j of prompt i."""

    request: CompletionRequest
    object_name = stream_object_name = "text_completion"
    id_prefix = "cmpl"

    def echo(self) -> dict[str, Any]:
        """The answer to `echo` with no tokens to generate: the prompts."""
        choices = [
            self._choice(i * self.n + j, self._prompt_text(prompt), "length", None)
            for i, prompt in enumerate(self.prompts)
            for j in range(self.n)
        ]
        usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts))
        return self.head(self.object_name) | {"choices": choices, "usage": usage.render()}

    def echo_chunks(self, content: dict[str, Any]) -> list[dict[str, Any]]:
        """The same as chunks of a stream."""
        usage = content["usage"]
        frame = {name: value for name, value in content.items() if name != "usage"}
        tail = [frame | {"choices": [], "usage": usage}] if self.wants_usage else []
        return [frame | {"choices": [choice]} for choice in content["choices"]] + tail

    def choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        return self._new_text(index, output, completion)

    def chunk_choices(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[dict[str, Any]]:
        return [self._new_text(index, output, completion)]

    def _new_text(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """A choice with what is new; in an answer of one piece that is everything."""
        number = index * self.n + completion.index
        is_first = self.is_first(number)
        prompt = self.prompts[index]
        text = completion.text
        echoed = self._prompt_text(prompt) if self.request.echo and is_first else ""
        choice = self._choice(number, echoed + text, completion.finish_reason, completion.stop_reason)
        if completion.logprobs is not None:
            renderer = self._logprobs(number, prompt)
            choice["logprobs"] = renderer.render(completion.token_ids, completion.logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = prompt.token_ids if is_first else None
        return choice

    def _logprobs(self, number: int, prompt: PromptInput) -> CompletionLogprobs:
        if number not in self.logprobs:
            offset = len(self._prompt_text(prompt)) if self.request.echo else 0
            self.logprobs[number] = CompletionLogprobs(self.tokenizer, self.request.logprobs or 0, offset)
        return self.logprobs[number]

    def _prompt_text(self, prompt: PromptInput) -> str:
        return self.tokenizer.decode(prompt.token_ids, False) if prompt.text is None else prompt.text

    @staticmethod
    def _choice(
        number: int, text: str, finish_reason: str | None, stop_reason: int | str | None
    ) -> dict[str, Any]:
        return {
            "index": number,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
