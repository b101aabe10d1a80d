"""OpenVINO GenAI: continuous batching over a paged cache, the model from a GGUF file, token ids in."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai
from child import Requests, serve

CACHE_GB = 2


class OpenVino:
    def __init__(self, model: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 128
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        precision = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
        self.configuration = (
            f"continuous batching, split fuse, prefix caching, {CACHE_GB} GB of cache, {threads} threads,"
            f" computes in {precision}, its default here"
        )

    def run(self, requests: Requests) -> list[int]:
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in requests]
        results = self.pipeline.generate(prompts, [_greedy(count) for _, count in requests])
        return [len(result.m_generation_ids[0]) for result in results]


def _greedy(count: int) -> openvino_genai.GenerationConfig:
    return openvino_genai.GenerationConfig(
        max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False
    )


if __name__ == "__main__":
    serve(OpenVino, "openvino", "openvino-genai")
