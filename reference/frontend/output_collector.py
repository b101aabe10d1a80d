"""Between an engine that never waits and a reader who may be slow: one output deep, however far the reader is behind.

The newest output of a request says everything that the ones before it said. So only that one is kept, and what is new
in it is measured from where the reader has read to. A backlog merges by itself.
(vLLM: `RequestOutputCollector`.)
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Literal

from reference.frontend.outputs import CompletionOutput, RequestOutput

OutputKind = Literal["cumulative", "delta", "final"]
OUTPUT_KINDS = ("cumulative", "delta", "final")


@dataclass
class _Position:
    """How far one sequence was read."""

    num_characters: int = 0
    num_tokens: int = 0
    finished: bool = False


class OutputCollector:
    """Outputs of one request on their way to whoever asked for them.

    Args:
        kind: "cumulative" outputs hold everything so far; a "delta" holds what was not read before, and only the
            sequences in which something is new; "final" gives the last output alone.
    """

    def __init__(self, kind: OutputKind) -> None:
        if kind not in OUTPUT_KINDS:
            raise ValueError(f"output_kind must be one of {', '.join(OUTPUT_KINDS)}, got {kind!r}.")
        self.kind = kind
        self._newest: RequestOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._positions: dict[int, _Position] = {}

    def put(self, output: RequestOutput) -> None:
        if self.kind == "final" and not output.finished:
            return
        self._newest = output
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """The reader gets what is left, and then this error."""
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """The next output. Raises what `fail` was given."""
        await self._ready.wait()
        if self._newest is None:
            assert self._error is not None
            raise self._error
        output, self._newest = self._newest, None
        if self._error is None:
            self._ready.clear()
        return self._read(output)

    def _read(self, output: RequestOutput) -> RequestOutput:
        read = [(completion, self._advance(completion)) for completion in output.outputs]
        if self.kind == "delta":
            return replace(output, outputs=[delta for _, delta in read if delta is not None])
        texts = [
            completion if delta is None else replace(completion, delta_text=delta.text)
            for completion, delta in read
        ]
        return replace(output, outputs=texts)

    def _advance(self, completion: CompletionOutput) -> CompletionOutput | None:
        """What is new in a sequence, or None."""
        position = self._positions.setdefault(completion.index, _Position())
        if position.finished:
            return None
        text = completion.text[position.num_characters :]
        token_ids = completion.token_ids[position.num_tokens :]
        logprobs = completion.logprobs
        if not (text or token_ids or completion.finished):
            return None
        delta = replace(
            completion,
            text=text,
            delta_text=text,
            token_ids=token_ids,
            logprobs=None if logprobs is None else logprobs[position.num_tokens :],
        )
        position.num_characters, position.num_tokens = len(completion.text), len(completion.token_ids)
        position.finished = completion.finished
        return delta
