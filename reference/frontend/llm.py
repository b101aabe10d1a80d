"""Offline generation: a list of prompts in, a list of outputs out (vLLM's `LLM`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import DEFAULT_MODEL, EngineArgs
from reference.frontend.engine_core import OnStep
from reference.frontend.input_processor import Prompt
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.logger import logger
from reference.frontend.metrics import Metrics
from reference.frontend.outputs import RequestOutput
from reference.frontend.tokenizer import Tokenizer

Message = Mapping[str, str]


class LLM:
    """An engine for batches of prompts.

    Args:
        tier: the implementation; `reference.LLM` and `fast.LLM` fix it.
        model: name of the embedded model, a Hugging Face style folder, or a GGUF file.
        on_step: see `EngineCore`.
        **options: those of `EngineArgs`.

    Raises:
        ValueError: an option is unknown or out of range, or the model cannot be loaded.
    """

    def __init__(
        self,
        tier: Tier,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> None:
        known = EngineArgs.__dataclass_fields__
        for name in options:
            if name not in known:
                raise ValueError(f"Unknown engine option {name!r}; known are: {', '.join(known)}.")
        args = EngineArgs(model=str(model) if isinstance(model, os.PathLike) else model, **options)
        self.llm_engine = LLMEngine.from_engine_args(args, tier, on_step)
        self._num_requests = 0

    def get_tokenizer(self) -> Tokenizer:
        return self.llm_engine.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while requests hold blocks."""
        was_reset = self.llm_engine.engine_core.scheduler.kv_cache_manager.reset_prefix_cache()
        if was_reset:
            self.llm_engine.metrics.prefix_cache.forget_recent()
        return was_reset

    def get_metrics(self) -> Metrics:
        """Counters, gauges and times of everything this engine has done so far."""
        return self.llm_engine.metrics.snapshot()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many.

        Args:
            prompts: text, token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}` or `{"prompt_embeds": ...}`, or a
                list of such. Embeddings are vectors [P, hidden size] in place of tokens, in any array with `__array__`
                or `__dlpack__`.
            sampling_params: one for all prompts, or one for each. With `structured_outputs` the text of each output is
                JSON of a schema, a match of a regular expression, one of some choices, a sentence of a grammar.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One output a prompt, in the order of the prompts. A request that the engine could not finish has the finish
            reason `error` and says why in `error`; one that somebody aborted meanwhile has none.

        Raises:
            ValueError: a prompt or parameter is not acceptable; nothing was generated.
        """
        prompt_list = _as_prompt_list(prompts)
        params_list = _as_params_list(sampling_params, len(prompt_list))
        request_ids = [str(self._num_requests + i) for i in range(len(prompt_list))]
        self._num_requests += len(request_ids)
        try:
            for request_id, prompt, params in zip(request_ids, prompt_list, params_list, strict=True):
                self.llm_engine.add_request(request_id, prompt, params)
            return self._run(request_ids, use_tqdm)
        except BaseException:
            # A refused prompt, or Ctrl-C: nothing of this call may stay behind in the engine.
            self.llm_engine.abort_request(request_ids)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each of several.

        Args:
            messages: `[{"role": "user", "content": "..."}]`, or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.

        Raises:
            ValueError: as in `generate`, or a message is malformed, or the model has no chat template.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError("messages must be a non-empty list of {'role': ..., 'content': ...}.")
        conversations = messages if isinstance(messages[0], list | tuple) else [messages]
        tokenizer = self.llm_engine.tokenizer
        prompts = [
            {
                "prompt": tokenizer.apply_chat_template(conversation),
                "prompt_token_ids": tokenizer.encode_chat(conversation),
            }
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def _run(self, request_ids: Sequence[str], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        num_tokens = dict.fromkeys(request_ids, 0)
        # A line of the log goes above the bar. An application's own handlers are left alone.
        console_loggers = [logger] if use_tqdm and logger.handlers else []
        # miniters=0: drawn anew by time alone. The rate moves with every token, the bar only when a request ends.
        with (
            tqdm(
                total=len(request_ids), desc="Generating", unit="prompt", disable=not use_tqdm, miniters=0
            ) as bar,
            logging_redirect_tqdm(console_loggers),
        ):
            while len(finished) < len(request_ids) and self.llm_engine.has_unfinished_requests():
                outputs = [output for output in self.llm_engine.step() if output.request_id in num_tokens]
                for output in outputs:
                    num_tokens[output.request_id] = output.metrics.num_output_tokens
                    if output.finished:
                        finished[output.request_id] = output
                if use_tqdm:
                    rate = sum(num_tokens.values()) / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
                    bar.update(sum(output.finished for output in outputs))
        return [finished[request_id] for request_id in request_ids if request_id in finished]


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one. A list that begins with an integer is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}.")
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return list(prompts)


def _as_params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, list | tuple):
        raise ValueError(
            f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}."
        )
    if len(params) != num_prompts:
        raise ValueError(
            f"Got {num_prompts} prompts and {len(params)} sampling_params; give one for each prompt."
        )
    return params
