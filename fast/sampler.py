"""From logits to tokens. Twin: `reference/sampler.py`.

What differs: one C++ call samples all rows, spread over the cores. A greedy row is a single pass for its
largest logit and draws nothing; top-k and top-p select instead of sorting the vocabulary; noise is generated
for the kept tokens only, which a counter-based generator allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fast import kernels


@dataclass(frozen=True)
class SamplingMetadata:
    """Parameters of the R rows to sample, one entry a row. `output_positions` counts outputs from 0."""

    temperature: torch.Tensor  # float64 [R]
    top_k: torch.Tensor  # int32 [R], 0 or -1 = off
    top_p: torch.Tensor  # float64 [R], in (0, 1]
    seeds: torch.Tensor  # int64 [R], the bit pattern of an unsigned seed: torch has no arithmetic for uint64
    output_positions: torch.Tensor  # int64 [R]


class Sampler:
    """Chooses one token a row. It has no state: a draw depends on the row and its parameters alone."""

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> list[int]:
        """Logits [R, V] -> R token ids; -1 for a row that contains NaN."""
        token_ids = torch.empty(len(logits), dtype=torch.int64)  # [R]
        kernels.sample(
            logits,
            metadata.temperature,
            metadata.top_k,
            metadata.top_p,
            metadata.seeds,
            metadata.output_positions,
            token_ids,
        )
        sampled: list[int] = token_ids.tolist()
        return sampled
