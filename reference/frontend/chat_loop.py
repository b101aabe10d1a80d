"""`twinfer chat`: a conversation at the terminal, streamed as it is generated.

The whole conversation is sent again with every turn. That is cheap, because all earlier turns are found in the prefix
cache: what it saved is shown after each answer.
"""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput

_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


class ChatLoop:
    """Reads turns from `source` until it ends, and writes answers to stdout.

    Args:
        engine: the engine to talk to.
        params: sampling parameters of every answer.
        system: system message; None leaves it to the chat template.
        source: where the user's turns come from.
    """

    def __init__(
        self, engine: LLMEngine, params: SamplingParams, system: str | None, source: TextIO = sys.stdin
    ) -> None:
        self.engine = engine
        self.params = params
        self.source = source
        self.console = Console(highlight=False, soft_wrap=True)
        self.start = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.start)
        self.num_turns = 0

    def run(self) -> int:
        """Returns the exit status."""
        self.console.print(_HELP, style="dim")
        while (line := self._read_line()) is not None:
            text = line.strip()
            if text == "/exit":
                break
            if text == "/reset":
                self.messages = list(self.start)
                self.console.print("A new conversation.", style="dim")
            elif text.startswith("/"):
                self.console.print(f"Unknown command {text}. {_HELP}", style="dim", markup=False)
            elif text:
                self._turn(text)
        return 0

    def _read_line(self) -> str | None:
        """The next line of the user, None at the end. Ctrl-C at the prompt only drops what was typed."""
        while True:
            try:
                if self.source is sys.stdin and sys.stdin.isatty():
                    return input("> ")  # with line editing
                line = self.source.readline()
                return line or None
            except KeyboardInterrupt:
                self.console.print("\n(/exit or Ctrl-D leaves)", style="dim")
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
            self.console.print(f"{error} /reset starts a new conversation.", style="red", markup=False)
            return
        output = self._stream(request_id)
        if output is None:
            return
        answer = output.outputs[0]
        if output.error is not None:
            self.console.print(f"The engine failed: {output.error}", style="red", markup=False)
            return
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._print_statistics(output)

    def _stream(self, request_id: str) -> RequestOutput | None:
        """Print the answer as it comes. Ctrl-C ends the answer and keeps what was said.

        None when Ctrl-C came while the engine was putting the last token away: then the turn is dropped.
        """
        try:
            while True:
                for output in self.engine.step():
                    self._print_delta(output)
                    if output.finished:
                        return output
        except KeyboardInterrupt:
            for output in self.engine.abort_request([request_id]):
                self._print_delta(output)
                return output
            return None

    def _print_delta(self, output: RequestOutput) -> None:
        sys.stdout.write(output.outputs[0].delta_text)
        sys.stdout.flush()

    def _print_statistics(self, output: RequestOutput) -> None:
        metrics, reason = output.metrics, output.outputs[0].finish_reason
        speed = ""
        if metrics.ttft_s is not None and metrics.latency_s is not None and metrics.num_output_tokens > 1:
            speed = f", {(metrics.num_output_tokens - 1) / max(metrics.latency_s - metrics.ttft_s, 1e-9):.1f} tokens/s"
        note = {"length": ", cut off by the length limit", "abort": ", stopped"}.get(str(reason), "")
        self.console.print(
            f"\n[{metrics.num_prompt_tokens} prompt tokens, {metrics.num_cached_tokens} of them cached; "
            f"{metrics.num_output_tokens} generated{speed}{note}]",
            style="dim",
            markup=False,
        )
