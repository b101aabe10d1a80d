"""POST /v1/chat/completions: the answer in one piece, or as a stream of deltas."""

from __future__ import annotations

from typing import Any

from reference.frontend.outputs import CompletionOutput, RequestOutput
from reference.frontend.server.answer import Answer
from reference.frontend.server.logprobs import chat_logprobs, prompt_logprobs
from reference.frontend.server.protocol import ChatCompletionRequest


class ChatAnswer(Answer):
    """One conversation; choice j is answer j of n."""

    request: ChatCompletionRequest
    object_name = "chat.completion"
    stream_object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        choice = self._choice(completion) | {"message": message} | self._token_ids(completion)
        if output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def chunk_choices(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[dict[str, Any]]:
        choices = []
        if self.is_first(completion.index):
            start = {"index": completion.index, "delta": {"role": "assistant", "content": ""}}
            choices.append(start | {"logprobs": None, "finish_reason": None, "stop_reason": None})
        delta = {"content": completion.text} if completion.text or not completion.finished else {}
        choices.append(self._choice(completion) | {"delta": delta} | self._token_ids(completion))
        return choices

    def head(self, object_name: str) -> dict[str, Any]:
        head = super().head(object_name)
        if self.request.return_token_ids:
            head["prompt_token_ids"] = self.prompts[0].token_ids
        return head

    def _token_ids(self, completion: CompletionOutput) -> dict[str, Any]:
        return {"token_ids": completion.token_ids} if self.request.return_token_ids else {}

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if completion.logprobs is not None:
            num_top = self.request.top_logprobs or 0
            logprobs = chat_logprobs(self.tokenizer, completion.token_ids, completion.logprobs, num_top)
        return {
            "index": completion.index,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
