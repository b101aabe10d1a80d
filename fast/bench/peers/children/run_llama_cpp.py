"""llama.cpp through xllamacpp: its server's slots and continuous batching, called in process, one thread a request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import xllamacpp
from child import Requests, serve, share_a_prefix

SLOTS, CONTEXT = (
    32,
    32 * 1280,
)  # as many requests as the largest workload has, and the longest of them in each


class LlamaCpp:
    def __init__(self, model: str, threads: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = SLOTS
        params.n_ctx = CONTEXT
        params.n_batch = params.n_ubatch = 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.kv_unified = True
        params.cont_batching = True
        params.n_gpu_layers = 0
        params.verbosity = 0
        self.server = xllamacpp.Server(params)
        self.pool = ThreadPoolExecutor(SLOTS)
        self.configuration = (
            f"{SLOTS} slots, continuous batching, prompt cache, unified KV, {threads} threads;"
            " requests of one long prefix go one after the other"
        )

    def run(self, requests: Requests) -> list[int]:
        # A slot keeps its last prompt and shares it with no other: at once, each request would compute the prefix.
        if share_a_prefix(requests):
            return [self._complete(request) for request in requests]
        return list(self.pool.map(self._complete, requests))

    def _complete(self, request: tuple[list[int], int]) -> int:
        ids, count = request
        answer = self.server.handle_completions(
            {
                "prompt": ids,
                "max_tokens": count,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": True,
                "stream": False,
            }
        )
        if "usage" not in answer:
            raise ValueError(str(answer)[:200])
        return int(answer["usage"]["completion_tokens"])


if __name__ == "__main__":
    serve(LlamaCpp, "xllamacpp")
