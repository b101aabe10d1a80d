"""A model's forward pass on the CPU as a recorded plan. The reference calls its model as it is.

The model is Python and stays so: it runs once, for nothing, while `kernels.Plan` writes down which kernels it calls on
which memory. Every step is then one call into C++, whose checks look at each array of the input once and not once a
layer. A step's numbers are copied to where the plan expects them; the copies are a few hundred bytes a request.

A decode step of the embedded model makes 272 kernel calls. On one Zen 5 core it takes 2.1 ms of CPU time replayed, and
2.8 ms where Python makes the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from fast import kernels
from fast.attention import AttentionMetadata
from fast.input_batch import StepInput
from reference.contracts.config import EngineConfig, cdiv

KVCache = tuple[torch.Tensor, torch.Tensor]

# A plan's tensors are laid out for the largest step. Above this the calls' own cost is nothing beside their work.
_MAX_PLANNED_TOKENS = 4096


class Model(Protocol):
    """What every class of `fast.models` is."""

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor: ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class _Recorded:
    plan: kernels.Plan
    inputs_embeds: torch.Tensor | None  # [max T, C], for a step with prompts that came as vectors
    hidden: torch.Tensor  # [max T, C], what the model returned


class PlannedForward:
    """`model.forward`, recorded when it is first needed and replayed from then on.

    Args:
        model: its weights do not move.
        kv_caches: K and V of each layer, each [N, B, Hkv, D]; they do not move.
        config: the largest step.
    """

    def __init__(self, model: Model, kv_caches: Sequence[KVCache], config: EngineConfig) -> None:
        self.model = model
        self.kv_caches = list(kv_caches)
        self.hidden_size = config.model.hidden_size
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.max_num_tokens = min(config.scheduler.max_num_batched_tokens, _MAX_PLANNED_TOKENS)
        max_blocks = cdiv(config.scheduler.max_model_len, config.cache.block_size)
        self._input_ids = np.zeros(self.max_num_tokens, np.int32)
        self._positions = np.zeros(self.max_num_tokens, np.int64)
        self._slot_mapping = np.zeros(self.max_num_tokens, np.int64)
        self._query_start_loc = np.zeros(self.max_num_seqs + 1, np.int32)
        self._seq_lens = np.zeros(self.max_num_seqs, np.int32)
        self._block_tables = np.zeros((self.max_num_seqs, max_blocks), np.int32)
        self._recorded: dict[bool, _Recorded] = {}  # with vectors in place of tokens, and without

    def load(self, step: StepInput) -> StepInput:
        """The step as it is: kernels read it where it was made."""
        return step

    def __call__(self, step: StepInput, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """A step's input -> [T, C], which the next call overwrites. Arguments and errors are those of the model."""
        metadata = step.attention
        num_tokens, num_seqs = len(step.input_ids), len(metadata.seq_lens)
        if num_tokens > self.max_num_tokens or num_seqs > self.max_num_seqs:
            return self.model.forward(step.input_ids, step.positions, self.kv_caches, metadata, inputs_embeds)
        recorded = self._recorded.get(inputs_embeds is not None)
        if recorded is None:
            recorded = self._recorded[inputs_embeds is not None] = self._record(inputs_embeds is not None)
        self._input_ids[:num_tokens] = step.input_ids.numpy()
        self._positions[:num_tokens] = step.positions.numpy()
        self._slot_mapping[:num_tokens] = metadata.slot_mapping.numpy()
        self._query_start_loc[: num_seqs + 1] = metadata.query_start_loc.numpy()
        self._seq_lens[:num_seqs] = metadata.seq_lens.numpy()
        self._block_tables[:num_seqs, : metadata.block_tables.shape[1]] = metadata.block_tables.numpy()
        if recorded.inputs_embeds is not None and inputs_embeds is not None:
            recorded.inputs_embeds[:num_tokens] = inputs_embeds
        recorded.plan.replay(num_tokens, num_seqs)
        return recorded.hidden[:num_tokens]

    def _record(self, with_vectors: bool) -> _Recorded:
        plan = kernels.Plan(self.max_num_tokens, self.max_num_seqs)
        input_ids, positions = torch.from_numpy(self._input_ids), torch.from_numpy(self._positions)
        metadata = AttentionMetadata(
            query_start_loc=torch.from_numpy(self._query_start_loc),
            seq_lens=torch.from_numpy(self._seq_lens),
            block_tables=torch.from_numpy(self._block_tables),
            slot_mapping=torch.from_numpy(self._slot_mapping),
        )
        inputs_embeds = None
        with plan.recording():
            if with_vectors:
                inputs_embeds = kernels.empty(self.max_num_tokens, self.hidden_size)
            hidden = self.model.forward(input_ids, positions, self.kv_caches, metadata, inputs_embeds)
        return _Recorded(plan, inputs_embeds, hidden)
