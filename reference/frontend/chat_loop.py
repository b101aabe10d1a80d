"""`twinfer chat`: a conversation at the terminal, streamed as it is generated.

The whole conversation is sent again with every turn. That is cheap, because all earlier turns are found in the prefix
cache: what it saved is shown after each answer.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput

_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


class ChatLoop:
    """Reads turns until the input ends, and writes answers to stdout.

    Args:
        engine: the engine to talk to.
        params: sampling parameters of every answer.
        system: system message; None leaves it to the chat template.
        source: where the user's turns come from, standard input unless given.
    """

    def __init__(
        self, engine: LLMEngine, params: SamplingParams, system: str | None, source: TextIO | None = None
    ) -> None:
        self.engine = engine
        self.params = params
        self.source = sys.stdin if source is None else source
        self.is_terminal = source is None and sys.stdin.isatty()
        if self.is_terminal:
            with suppress(ImportError):  # not on every system
                import readline  # noqa: F401  (gives `input` line editing and a history)
        self.console = Console(highlight=False, soft_wrap=True)
        self.start = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.start)
        self.num_turns = 0

    def run(self) -> int:
        """Returns the exit status.

        Raises:
            ValueError: the model has no chat template, so no turn could ever be answered.
        """
        self.engine.tokenizer.apply_chat_template([*self.start, {"role": "user", "content": "Hello"}])
        self._note(_HELP)
        while (line := self._read_line()) is not None:
            text = line.strip()
            if text == "/exit":
                break
            if text == "/reset":
                self.messages = list(self.start)
                self._note("A new conversation.")
            elif text.startswith("/"):
                self._note(f"Unknown command {text}. {_HELP}")
            elif text:
                self._turn(text)
        return 0

    def _note(self, text: str, style: str = "dim") -> None:
        self.console.print(text, style=style, markup=False)

    def _read_line(self) -> str | None:
        """The next line of the user, None at the end. Ctrl-C at the prompt only drops what was typed."""
        while True:
            try:
                return input("> ") if self.is_terminal else self.source.readline() or None
            except KeyboardInterrupt:
                self._note("\n(/exit or Ctrl-D leaves)")
            except EOFError:
                self.console.print()
                return None

    def _turn(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        request_id = f"turn-{self.num_turns}"
        self.num_turns += 1
        try:
            prompt = {"prompt_token_ids": self.engine.tokenizer.encode_chat(messages)}
            self.engine.add_request(request_id, prompt, self.params)
        except ValueError as error:
            self._note(f"{error} /reset starts a new conversation.", "red")
            return
        output = self._stream(request_id)
        answer = output.outputs[0]
        if output.error is not None:
            self._note(f"The engine failed ({output.error}); this turn is forgotten.", "red")
            return
        if answer.text:  # stopped before the first word, the turn leaves no trace
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._note(self._statistics(output))

    def _stream(self, request_id: str) -> RequestOutput:
        """Print the answer as it comes. Ctrl-C ends the answer and keeps what was said."""
        with _interrupts_noted() as was_interrupted:
            while True:
                outputs = self.engine.step()
                if was_interrupted():
                    outputs += self.engine.abort_request(request_id)
                for output in outputs:
                    sys.stdout.write(output.outputs[0].delta_text)
                    sys.stdout.flush()
                    if output.finished:
                        return output

    def _statistics(self, output: RequestOutput) -> str:
        metrics, reason = output.metrics, output.outputs[0].finish_reason
        text = (
            f"\n[{metrics.num_prompt_tokens} prompt tokens, {metrics.num_cached_tokens} of them cached; "
            f"{metrics.num_output_tokens} generated"
        )
        if metrics.ttft_s is not None and metrics.latency_s is not None and metrics.num_output_tokens > 1:
            seconds = max(metrics.latency_s - metrics.ttft_s, 1e-9)
            text += f", {(metrics.num_output_tokens - 1) / seconds:.1f} tokens/s"
        if reason == "abort":
            text += "; stopped"
        elif reason == "length":
            length = metrics.num_prompt_tokens + metrics.num_output_tokens
            is_full = length >= self.engine.config.max_total_tokens
            text += (
                "; the conversation is full: /reset starts a new one"
                if is_full
                else "; cut off by --max-tokens"
            )
        return f"{text}]"


@contextmanager
def _interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C only sets what the yielded function tells.

    As an exception it could strike in the middle of the scheduler's bookkeeping; noted, it is acted on between steps.
    Who presses it again does not want to wait for the end of a long step, and leaves the program.
    """
    noted = False

    def note(signal_number: int, frame: object) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, previous)
