"""The embedded model for pages that need words: loaded once while the site is built, and shared by all of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from reference.frontend.llm import LLM
from reference.frontend.model_store import resolve_model
from reference.frontend.tiers import load_tier
from reference.frontend.tokenizer import Tokenizer, load_tokenizer

MODEL = "smollm2-135m"


@cache
def tokenizer() -> Tokenizer:
    """The embedded model's, without its weights."""
    return load_tokenizer(resolve_model(MODEL))


def engine(tier: str = "fast", **options: Any) -> LLM:
    """A tracing engine with the embedded model. Calls with the same options get the same one, so a page that counts
    steps begins at `len(engine.llm_engine.engine_core.traces)`."""
    return _engine(tier, tuple(sorted(options.items())))


@cache
def _engine(tier: str, options: tuple[tuple[str, Any], ...]) -> LLM:
    settings = {"num_blocks": 65, "max_model_len": 512, "trace": True} | dict(options)
    return LLM(load_tier(tier), MODEL, **settings)
