"""Runs with and without guesses on the embedded model: docs/speculation.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from docs.support.engines import MODEL
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.trace import StepTrace
from reference.frontend.llm import LLM
from reference.frontend.metrics import Metrics
from reference.frontend.tiers import load_tier

LIST = "Repeat this list twice.\n1. red apple\n2. green pear\n3. yellow banana\n4. blue plum\n"
METHODS: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4, "model": MODEL},
}


@dataclass(frozen=True)
class Run:
    """One answer."""

    text: str
    token_ids: Sequence[int]
    traces: Sequence[StepTrace]
    metrics: Metrics


@cache
def run(method: str, temperature: float, tier: str = "fast") -> Run:
    """The answer to LIST, and the steps that it took."""
    options: dict[str, Any] = {"num_blocks": 40, "max_model_len": 256, "trace": True}
    llm = LLM(load_tier(tier), MODEL, speculative=METHODS[method], **options)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    (output,) = llm.chat([{"role": "user", "content": LIST}], params, use_tqdm=False)
    answer = output.outputs[0]
    return Run(answer.text, tuple(answer.token_ids), llm.llm_engine.engine_core.traces, llm.get_metrics())
