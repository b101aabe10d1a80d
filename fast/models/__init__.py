"""Which class runs which architecture. Twin: `reference/models/__init__.py`; only the classes differ."""

from __future__ import annotations

from fast.models.gpt2 import GPT2LMHeadModel
from fast.models.llama import LlamaForCausalLM

_MODELS: dict[str, type[GPT2LMHeadModel] | type[LlamaForCausalLM]] = {
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
}


def get_model_class(architecture: str) -> type[GPT2LMHeadModel] | type[LlamaForCausalLM]:
    """The model class for an architecture name.

    Raises:
        ValueError: no class here runs it; the sentence lists those that exist.
    """
    try:
        return _MODELS[architecture]
    except KeyError:
        known = ", ".join(sorted(_MODELS))
        message = f"The architecture {architecture!r} is not supported; choose a model of: {known}."
        raise ValueError(message) from None
