"""Offline generation: a list of prompts in, a list of outputs out (vLLM's `LLM`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm

from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import EngineArgs
from reference.frontend.engine_core import OnStep
from reference.frontend.input_processor import Prompt
from reference.frontend.llm_engine import LLMEngine
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

    def __init__(self, tier: Tier, model: str, on_step: OnStep | None = None, **options: Any) -> None:
        unknown = sorted(set(options) - set(EngineArgs.__dataclass_fields__))
        if unknown:
            known = ", ".join(EngineArgs.__dataclass_fields__)
            raise ValueError(f"Unknown engine option {unknown[0]!r}; known are: {known}.")
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model, **options), tier, on_step)
        self._num_requests = 0

    def get_tokenizer(self) -> Tokenizer:
        return self.llm_engine.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while requests are running."""
        return self.llm_engine.engine_core.scheduler.kv_cache_manager.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many.

        Args:
            prompts: text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`, or a list of such.
            sampling_params: one for all prompts, or one for each.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One output a prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt or parameter is not acceptable; nothing was generated.
        """
        prompt_list = _as_prompt_list(prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        params_list = [params] * len(prompt_list) if isinstance(params, SamplingParams) else list(params)
        if len(params_list) != len(prompt_list):
            raise ValueError(f"Got {len(prompt_list)} prompts and {len(params_list)} sampling_params; give one of each.")
        request_ids = [str(self._num_requests + i) for i in range(len(prompt_list))]
        try:
            for request_id, prompt, item in zip(request_ids, prompt_list, params_list, strict=True):
                self.llm_engine.add_request(request_id, prompt, item)
            return self._run(request_ids, use_tqdm)
        except BaseException:
            # A refused prompt, or Ctrl-C: nothing of this call may stay behind in the engine.
            self.llm_engine.abort_request(request_ids)
            raise
        finally:
            self._num_requests += len(request_ids)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each of several.

        Args:
            messages: `[{"role": "user", "content": "..."}]`, or a list of such lists.
        """
        if not messages:
            raise ValueError("messages must not be empty.")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self.llm_engine.tokenizer
        prompts = [{"prompt_token_ids": tokenizer.encode_chat(conversation)} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def _run(self, request_ids: Sequence[str], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        num_tokens = 0
        with tqdm(total=len(request_ids), desc="Generating", unit="prompt", disable=not use_tqdm) as bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    if output.finished:
                        finished[output.request_id] = output
                        num_tokens += output.metrics.num_output_tokens
                        elapsed = bar.format_dict["elapsed"]
                        bar.set_postfix_str(f"{num_tokens / max(elapsed, 1e-9):.1f} tok/s", refresh=False)
                        bar.update()
        return [finished[request_id] for request_id in request_ids]


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one. A list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}.")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)
