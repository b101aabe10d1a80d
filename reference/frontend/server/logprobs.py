"""Log-probabilities as OpenAI's two APIs show them.

A token can be a part of a character. Its text then is "bytes:" and the bytes, as at OpenAI, so that two such tokens
never look alike, and `bytes` holds them: joined over all tokens they are the UTF-8 of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from reference.frontend.outputs import Logprob
from reference.frontend.tokenizer import Tokenizer

Table = dict[int, Logprob]


def token_text(token_bytes: bytes) -> str:
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class CompletionLogprobs:
    """The `logprobs` of /v1/completions, of one sequence; called with the new tables each time.

    Offsets are characters of the text: all tokens of one character stand where the character begins.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self.tokenizer = tokenizer
        self.num_top = num_top
        self._offset = 0  # characters of the text in front of a token
        self._partial = b""  # a character that is not complete yet

    def render(
        self, token_ids: Sequence[int], tables: Sequence[Table | None], num_prompt_tokens: int = 0
    ) -> dict[str, Any]:
        """The next tokens; so many of them are the prompt's.

        The prompt is shown with its special tokens. Its first one has no table, and null in the place of a logprob.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for position, (token_id, table) in enumerate(zip(token_ids, tables, strict=True)):
            content = self.tokenizer.token_bytes(token_id)
            tokens.append(token_text(content))
            logprobs.append(None if table is None else table[token_id].logprob)
            top.append(None if table is None else self._top(token_id, table))
            offsets.append(self._offset)
            if position < num_prompt_tokens or token_id not in self.tokenizer.special_ids:
                self._advance(content)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top if self.num_top else None,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, table: Table) -> dict[str, float]:
        """The best tokens and, as at OpenAI, the sampled one even if it is none of them."""
        return {
            token_text(self.tokenizer.token_bytes(candidate)): entry.logprob
            for candidate, entry in table.items()
            if candidate == token_id or entry.rank <= self.num_top
        }

    def _advance(self, content: bytes) -> None:
        known = self._partial + content
        try:
            self._offset += len(known.decode())
            self._partial = b""
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                self._offset += len(known[: error.start].decode())
                self._partial = known[error.start :]
            else:  # no text at all: shown with replacement characters
                self._offset += len(known.decode(errors="replace"))
                self._partial = b""


def prompt_logprobs(tables: Sequence[Table | None]) -> list[dict[str, Any] | None]:
    """The extra field `prompt_logprobs` of both endpoints, as vLLM gives it: by token id, the prompt's token first."""
    return [
        None if table is None else {str(token_id): asdict(entry) for token_id, entry in table.items()}
        for table in tables
    ]


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], tables: Sequence[Table], num_top: int
) -> dict[str, Any]:
    """The `logprobs` of /v1/chat/completions for new tokens."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        content = tokenizer.token_bytes(token_id)
        return {"token": token_text(content), "logprob": logprob.logprob, "bytes": list(content)}

    content = []
    for token_id, table in zip(token_ids, tables, strict=True):
        best = [entry(other, logprob) for other, logprob in table.items() if logprob.rank <= num_top]
        best.sort(key=lambda item: -float(item["logprob"]))
        content.append(entry(token_id, table[token_id]) | {"top_logprobs": best[:num_top]})
    return {"content": content, "refusal": None}
