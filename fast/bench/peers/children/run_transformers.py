"""Hugging Face transformers on torch, float32: static batches of requests of similar length, padded on the left."""

from __future__ import annotations

import torch
from child import Requests, serve
from transformers import AutoModelForCausalLM

BATCH = 8


class Transformers:
    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model.eval()
        self.configuration = (
            f"generate, float32, sdpa, static batches of {BATCH} sorted by length, {threads} threads"
        )

    def run(self, requests: Requests) -> list[int]:
        order = sorted(range(len(requests)), key=lambda i: (requests[i][1], len(requests[i][0])))
        generated = [0] * len(requests)
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            longest = self._generate([requests[i][0] for i in batch], max(requests[i][1] for i in batch))
            for i in batch:
                generated[i] = min(longest, requests[i][1])  # what it made beyond that is thrown away
        return generated

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], count: int) -> int:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])  # [S, width]
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
        return int(output.shape[1]) - width


if __name__ == "__main__":
    serve(Transformers, "transformers", "torch")
