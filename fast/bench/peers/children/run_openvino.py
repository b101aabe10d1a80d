"""OpenVINO GenAI: continuous batching over a paged cache, the model from a GGUF file, token ids in.

Argument: the type it computes in, `float32`; without one, what it takes by itself.
"""

from __future__ import annotations

import sys

import numpy as np
import openvino
import openvino_genai
from child import Requests, serve, share_a_prefix

CACHE_GB = 2


class OpenVino:
    def __init__(self, model: str, threads: int, *types: str) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 128
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties: dict[str, object] = {"INFERENCE_NUM_THREADS": threads}
        if "float32" in types:
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        default = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
        self.configuration = (
            f"continuous batching, split fuse, prefix caching, {CACHE_GB} GB of cache, {threads} threads,"
            f" computes in {types[0] if types else f'{default}, its default here'};"
            " of requests of one long prefix the first goes ahead alone"
        )

    def run(self, requests: Requests) -> list[int]:
        if share_a_prefix(requests):  # at once, each of them would compute the prefix
            return self._generate(requests[:1]) + self._generate(requests[1:])
        return self._generate(requests)

    def _generate(self, requests: Requests) -> list[int]:
        prompts = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in requests]
        results = self.pipeline.generate(prompts, [_greedy(count) for _, count in requests])
        return [len(result.m_generation_ids[0]) for result in results]


def _greedy(count: int) -> openvino_genai.GenerationConfig:
    return openvino_genai.GenerationConfig(
        max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False
    )


if __name__ == "__main__":
    serve(lambda model, threads: OpenVino(model, threads, *sys.argv[1:]), "openvino", "openvino-genai")
