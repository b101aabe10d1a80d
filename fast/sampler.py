"""From logits to tokens. Twin: `reference/sampler.py`.

What differs: one C++ call samples all rows, spread over the cores. A greedy row is a single pass for its
largest logit and draws nothing; top-k and top-p select instead of sorting the vocabulary; noise is generated
for the kept tokens only, which a counter-based generator allows. 64 rows of 49,152 logits N(0, 4²), ms of CPU
time on one Zen 5 core: top-k 50 with top-p 0.95 3.1, top-p 0.95 alone 5.8, top-k 1,000 with top-p 7.3, no
filter 8.0. The steps before temperature touch the tokens they are about and not the vocabulary: each row with
such steps keeps its counts from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch

from fast import kernels
from reference.contracts.logits import masked_token_ids
from reference.contracts.sampling_params import SamplingParams

NAN_IN_ROW = -1  # in place of a token id
NO_TOKEN_LEFT = -2


class _TokenCounts:
    """How often each token was seen in the output; tokens of the prompt have an entry too.

    Invariant: ids[:size] are distinct, and counts[i] belongs to ids[i]. Adding a token costs one look-up.
    """

    def __init__(self) -> None:
        self._ids = np.zeros(64, dtype=np.int32)
        self._counts = np.zeros(64, dtype=np.int32)
        self._place: dict[int, int] = {}

    def add(self, token_ids: Iterable[int], occurrences: int) -> None:
        for token_id in token_ids:
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._ids):
                zeros = np.zeros_like(self._ids)
                self._ids = np.concatenate([self._ids, zeros])
                self._counts = np.concatenate([self._counts, zeros])
            self._ids[place] = token_id
            self._counts[place] += occurrences

    def copy(self) -> _TokenCounts:
        copied = _TokenCounts()
        copied._ids, copied._counts, copied._place = self._ids.copy(), self._counts.copy(), self._place.copy()
        return copied

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._place)]


@dataclass(eq=False)
class ProcessedRow:
    """What changes a row's logits before temperature: the request's rules, and the tokens they look at.

    Lives as long as its request stays in the batch: `output_token_ids` grows, and what is new is counted when
    the row is sampled next.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]

    def __post_init__(self) -> None:
        params = self.params
        self._allowed = np.array(sorted(set(params.allowed_token_ids or ())), dtype=np.int32)
        self._biased = np.array(list(params.logit_bias), dtype=np.int32)
        self._biases = np.array(list(params.logit_bias.values()), dtype=np.float64)
        self._seen = _TokenCounts()
        self._num_counted = 0  # of the output
        if params.repetition_penalty != 1:
            self._seen.add(self.prompt_token_ids, 0)

    def followed_by(self, token_ids: Sequence[int]) -> ProcessedRow:
        """The same behind these tokens, as if they were output: a copy for one step, with counts of its own."""
        if not token_ids:
            return self
        self._catch_up()
        row = copy(self)
        row.output_token_ids = [*self.output_token_ids, *token_ids]
        if self.params.has_penalties:
            row._seen = self._seen.copy()
        return row

    def _catch_up(self) -> None:
        if self.params.has_penalties:
            self._seen.add(self.output_token_ids[self._num_counted :], 1)
            self._num_counted = len(self.output_token_ids)


def _as_lists(parts: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrays side by side: offsets int64 [P + 1], and their concatenation."""
    starts = np.zeros(len(parts) + 1, dtype=np.int64)  # [P + 1]
    np.cumsum([len(part) for part in parts], out=starts[1:])
    return torch.from_numpy(starts), torch.from_numpy(np.concatenate(parts))


def _process_logits(logits: torch.Tensor, processed_rows: Mapping[int, ProcessedRow]) -> None:
    """Masks, biases and penalties, in place and in one call for all rows that have any."""
    indices = sorted(processed_rows)  # P
    rows = [processed_rows[r] for r in indices]
    for row in rows:
        row._catch_up()
    masked = [masked_token_ids(row.params, row.output_token_ids) for row in rows]
    steps = (
        torch.tensor(indices),
        *_as_lists([row._allowed for row in rows]),
        *_as_lists([np.fromiter(ids, dtype=np.int32, count=len(ids)) for ids in masked]),
        *_as_lists([row._biased for row in rows]),
        torch.from_numpy(np.concatenate([row._biases for row in rows])),
        *_as_lists([row._seen.ids for row in rows]),
        torch.from_numpy(np.concatenate([row._seen.counts for row in rows])),
        torch.tensor([row.params.repetition_penalty for row in rows], dtype=torch.float64),
        torch.tensor([row.params.presence_penalty for row in rows], dtype=torch.float64),
        torch.tensor([row.params.frequency_penalty for row in rows], dtype=torch.float64),
    )
    kernels.process_logits(logits, *map(kernels.place, steps))


@dataclass(frozen=True)
class SamplingMetadata:
    """Parameters of the R rows to sample, one entry a row. `output_positions` counts outputs from 0."""

    temperature: torch.Tensor  # float64 [R]
    top_k: torch.Tensor  # int32 [R], 0 or -1 = off
    top_p: torch.Tensor  # float64 [R], in (0, 1]
    min_p: torch.Tensor  # float64 [R], in [0, 1], 0 = off
    seeds: torch.Tensor  # int64 [R], the bit pattern of an unsigned seed: torch has no arithmetic for uint64
    output_positions: torch.Tensor  # int64 [R]
    processed_rows: Mapping[int, ProcessedRow]  # of the R, those with `SamplingParams.changes_logits`
    bitmasks: Mapping[int, np.ndarray] = field(
        default_factory=dict
    )  # of those with a grammar: int32 [cdiv(V, 32)]


class Sampler:
    """Chooses one token a row. It has no state: a draw depends on the row and its parameters alone."""

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> list[int]:
        """Logits [R, V] -> R token ids; NAN_IN_ROW for a row that contains NaN, NO_TOKEN_LEFT for one without a choice.

        Rows of `metadata.processed_rows` and `metadata.bitmasks` are changed in place.
        """
        if metadata.bitmasks:
            masked = sorted(metadata.bitmasks)
            bitmasks = torch.from_numpy(np.stack([metadata.bitmasks[r] for r in masked]))  # [P, cdiv(V, 32)]
            kernels.apply_token_bitmask(logits, kernels.place(torch.tensor(masked)), kernels.place(bitmasks))
        if metadata.processed_rows:
            _process_logits(logits, metadata.processed_rows)
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)  # [R]
        kernels.sample(
            logits,
            kernels.place(metadata.temperature),
            kernels.place(metadata.top_k),
            kernels.place(metadata.top_p),
            kernels.place(metadata.min_p),
            kernels.place(metadata.seeds),
            kernels.place(metadata.output_positions),
            token_ids,
        )
        if metadata.bitmasks or metadata.processed_rows:
            # Minus infinity is drawn only where there is nothing else.
            rows = kernels.place(torch.tensor(sorted({*metadata.bitmasks, *metadata.processed_rows})))
            drawn = token_ids[rows]
            has_none = (drawn >= 0) & (logits[rows, drawn.clamp(min=0)] == -torch.inf)
            token_ids[rows] = drawn.masked_fill(has_none, NO_TOKEN_LEFT)
        sampled: list[int] = token_ids.tolist()
        return sampled
