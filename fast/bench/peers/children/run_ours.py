"""This project's engine, as a user of `LLM` runs it. Argument: the tier."""

from __future__ import annotations

import sys

from child import Requests, serve

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.llm import LLM
from reference.frontend.tiers import load_tier


class Ours:
    def __init__(self, tier: str, model: str) -> None:
        self.llm = LLM(load_tier(tier), model)
        self.configuration = "defaults of LLM, exact mode"

    def run(self, requests: Requests) -> list[int]:
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(lambda model, threads: Ours(sys.argv[1], model), "twinfer")
