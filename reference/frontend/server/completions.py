"""POST /v1/completions: the answer in one piece, or as a stream of deltas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference.frontend.outputs import CompletionOutput, RequestOutput
from reference.frontend.server.answer import Answer
from reference.frontend.server.generation import Usage
from reference.frontend.server.logprobs import CompletionLogprobs, Table, prompt_logprobs
from reference.frontend.server.prompts import PromptInput
from reference.frontend.server.protocol import CompletionRequest


class CompletionAnswer(Answer):
    """Choice `i * n + j` is completion j of prompt i."""

    request: CompletionRequest
    object_name = stream_object_name = "text_completion"
    id_prefix = "cmpl"

    @property
    def is_echo_alone(self) -> bool:  # type: ignore[override]
        """The prompt was scored, and what was generated on the way is not shown."""
        return self.request.echo and self.request.max_tokens == 0

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
        if self.is_echo_alone:
            nothing: list[Table] | None = None if completion.logprobs is None else []
            completion = replace(completion, text="", token_ids=[], logprobs=nothing, stop_reason=None)
            completion.finish_reason = completion.finish_reason and "length"
        number = index * self.n + completion.index
        is_first = self.is_first(number)
        prompt = self.prompts[index]
        is_echo = self.request.echo and is_first
        text = (self._prompt_text(prompt) if is_echo else "") + completion.text
        choice = self._choice(number, text, completion.finish_reason, completion.stop_reason)
        if completion.logprobs is not None:
            tables = (output.prompt_logprobs or []) if is_echo else []
            token_ids = prompt.token_ids if is_echo else []
            choice["logprobs"] = self._render_logprobs(
                number, token_ids + completion.token_ids, [*tables, *completion.logprobs], len(token_ids)
            )
        if self.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        if self.request.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = prompt.token_ids if is_first else None
        return choice

    def _render_logprobs(
        self, number: int, token_ids: list[int], tables: list[Table | None], num_prompt_tokens: int
    ) -> dict[str, Any]:
        renderer = self.logprobs.setdefault(
            number, CompletionLogprobs(self.tokenizer, self.request.logprobs or 0)
        )
        return renderer.render(token_ids, tables, num_prompt_tokens)

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
