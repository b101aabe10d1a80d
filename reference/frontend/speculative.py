"""The option `speculative` of an engine: a table, as vLLM's `speculative_config` is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from reference.contracts.config import SpeculativeMethod

_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
_ONLY_FOR = {
    "prompt_lookup_max": "ngram",
    "prompt_lookup_min": "ngram",
    "model": "draft_model",
    "num_blocks": "draft_model",
    "kv_cache_memory": "draft_model",
}


@dataclass(frozen=True)
class SpeculativeArgs:
    """What the table says.

    Args:
        method: "ngram" or "draft_model".
        num_speculative_tokens: tokens guessed a step.
        prompt_lookup_max: longest tail of a sequence that is searched for in it, 5 unless given.
        prompt_lookup_min: shortest one, 2 unless given.
        model: the draft model, as the engine's own option `model`.
        num_blocks: size of the draft model's block pool; excludes kv_cache_memory.
        kv_cache_memory: bytes for it; unless given, by the rule for the engine's own pool.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int
    model: str | None
    num_blocks: int | None
    kv_cache_memory: int | None

    @classmethod
    def parse(cls, table: object) -> SpeculativeArgs:
        """Read a table as it came from Python or JSON.

        Raises:
            ValueError: a key is unknown, missing or of no use to the method, or a value is not acceptable.
        """
        if not isinstance(table, Mapping):
            raise ValueError(f"speculative must be a table such as {_EXAMPLE}, got {table!r}.")
        known = [field.name for field in fields(cls)]
        for name in table:
            if name not in known:
                raise ValueError(f"Unknown key {name!r} in speculative; known are: {', '.join(known)}.")
        method: Any = table.get("method")
        if method not in get_args(SpeculativeMethod):
            raise ValueError(f"speculative method must be 'ngram' or 'draft_model', got {method!r}.")
        for name, owner in _ONLY_FOR.items():
            if table.get(name) is not None and owner != method:
                raise ValueError(f"speculative {name} is for method {owner!r}; leave it out with {method!r}.")
        if table.get("num_speculative_tokens") is None:
            raise ValueError(
                f"speculative needs num_speculative_tokens, the tokens to guess a step: {_EXAMPLE}."
            )
        if method == "draft_model" and (not isinstance(table.get("model"), str) or not table["model"]):
            raise ValueError(
                f"speculative model must name the draft model: a model folder or GGUF file, got {table.get('model')!r}."
            )
        return cls._with_defaults(method, table)

    @classmethod
    def _with_defaults(cls, method: SpeculativeMethod, table: Mapping[str, Any]) -> SpeculativeArgs:
        numbers = {name: _number(table, name) for name in _LEAST}
        longest, shortest = numbers["prompt_lookup_max"], numbers["prompt_lookup_min"]
        if longest is not None and shortest is not None and shortest > longest:
            raise ValueError(
                f"speculative prompt_lookup_min ({shortest}) must be at most prompt_lookup_max ({longest})."
            )
        if numbers["num_blocks"] is not None and numbers["kv_cache_memory"] is not None:
            raise ValueError(
                "speculative num_blocks and kv_cache_memory both set the size of the draft model's pool; give only one "
                "of them."
            )
        num_speculative_tokens = numbers["num_speculative_tokens"]
        assert num_speculative_tokens is not None
        return cls(
            method=method,
            num_speculative_tokens=num_speculative_tokens,
            # One that is given moves the default of the other.
            prompt_lookup_max=max(5, shortest or 0) if longest is None else longest,
            prompt_lookup_min=min(2, longest or 2) if shortest is None else shortest,
            model=table.get("model"),
            num_blocks=numbers["num_blocks"],
            kv_cache_memory=numbers["kv_cache_memory"],
        )


_LEAST = {
    "num_speculative_tokens": 1,
    "prompt_lookup_max": 1,
    "prompt_lookup_min": 1,
    "num_blocks": 2,
    "kv_cache_memory": 1,
}


def _number(table: Mapping[str, Any], name: str) -> int | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"speculative {name} must be an integer, got {value!r}.")
    if value < _LEAST[name]:
        raise ValueError(f"speculative {name} must be at least {_LEAST[name]}, got {value}.")
    return value
