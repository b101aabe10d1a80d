"""The logits of one request under different circumstances, to the last bit: docs/determinism.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from docs.support.engines import MODEL
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.frontend.llm import LLM
from reference.frontend.tiers import load_tier

QUESTION = "The capital of France is"
OTHERS = ("Once upon a time there was", "The three primary colours are", "Bees make", "Water boils at")


@dataclass(frozen=True)
class Answer:
    """What became of QUESTION."""

    logits: np.ndarray  # float32 [8, V]: of its eight tokens
    preemptions: int  # of everybody in the engine


@cache
def answer(tier: str, others: int = 0, budget: int = 512, num_blocks: int = 65) -> Answer:
    """With so many other requests in the engine. Blocks of 4 tokens, so that a small pool runs out."""
    found: list[np.ndarray] = []
    preempted: list[str] = []

    def keep(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        preempted.extend(schedule.preempted_req_ids)
        found.extend(rows for name, rows in (output.logits or {}).items() if name == "0")

    options: dict[str, Any] = {
        "block_size": 4,
        "max_model_len": 40,
        "enable_prefix_caching": False,
        "keep_logits": True,
    }
    llm = LLM(
        load_tier(tier), MODEL, on_step=keep, num_blocks=num_blocks, max_num_batched_tokens=budget, **options
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.generate([QUESTION, *OTHERS[:others]], params, use_tqdm=False)
    return Answer(np.concatenate(found), len(preempted))


def compare(alone: np.ndarray, other: np.ndarray) -> Sequence[str]:
    """Cells of a table: are the bits equal, how many differ, by how much at most, and are the tokens equal."""
    differs = alone.view(np.int32) != other.view(np.int32)
    return (
        "yes" if not differs.any() else "no",
        f"{differs.mean():.0%}",
        f"{np.abs(alone - other).max():.1e}",
        "yes" if (alone.argmax(1) == other.argmax(1)).all() else "no",
    )
