"""CTranslate2. Argument: the type it computes in, float32 or int8.

`run_ctranslate2.py convert FOLDER TARGET` writes the form it reads, from a folder in Hugging Face's format.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ctranslate2
from child import Requests, serve

BATCH = 16


class CTranslate2:
    def __init__(self, model: str, threads: int, compute_type: str) -> None:
        self.generator = ctranslate2.Generator(
            model, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
        )
        self.tokens = json.loads((Path(model) / "vocabulary.json").read_text(encoding="utf-8"))
        self.configuration = (
            f"generate_batch, {compute_type}, static batches of {BATCH} sorted by length, {threads} threads"
        )

    def run(self, requests: Requests) -> list[int]:
        order = sorted(range(len(requests)), key=lambda i: (requests[i][1], len(requests[i][0])))
        generated = [0] * len(requests)
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            count = max(requests[i][1] for i in batch)
            results = self.generator.generate_batch(
                [[self.tokens[token_id] for token_id in requests[i][0]] for i in batch],
                max_length=count,
                min_length=count,
                sampling_topk=1,
                include_prompt_in_result=False,
            )
            for i, result in zip(batch, results, strict=True):
                # What it made beyond that is thrown away: a static batch runs to its longest answer.
                generated[i] = min(len(result.sequences_ids[0]), requests[i][1])
        return generated


def convert(folder: str, target: str) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(folder).convert(target)


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:])
    else:
        serve(lambda model, threads: CTranslate2(model, threads, sys.argv[1]), "ctranslate2")
