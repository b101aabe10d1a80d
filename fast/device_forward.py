"""A model's forward pass on a device: buffers that stay, and decode steps recorded as CUDA graphs.

A decode step of a small model is hundreds of kernels of a few microseconds, and Python takes longer to launch one than
a GPU to run it. A graph launches them all in one call, but works on the memory it was recorded with and on the number
of rows it was recorded for. So a step's input is copied into buffers that never move, and a decode step is padded to
the next of a few sizes, each recorded when it is first needed. A row that only pads has no slot and no context: it
writes nothing and attends to nothing.

On the emulator the same steps are padded and run, and nothing is recorded.

Source: vLLM's `v1/worker/gpu_model_runner.py` and `v1/cudagraph_dispatcher.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fast.attention import AttentionMetadata
from fast.cpu_forward import KVCache, Model
from fast.input_batch import StepInput
from reference.contracts.config import EngineConfig, cdiv

NO_SLOT = -1


def padding_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the decode steps that are recorded, ascending: few, and none more than twice what it is for.

    1, 2, 4, then every eighth number; the last holds `max_num_seqs`.
    """
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    return [*sizes, *range(8, max_num_seqs, 8), max_num_seqs]


def padded_size(num_seqs: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending sizes that holds so many rows."""
    return next(size for size in sizes if size >= num_seqs)


class DeviceForward:
    """`model.forward` on a device.

    Args:
        model: its weights do not move.
        kv_caches: K and V of each layer, each [N, B, Hkv, D], on the device; they do not move.
        config: the largest step.
    """

    def __init__(self, model: Model, kv_caches: Sequence[KVCache], config: EngineConfig) -> None:
        self.model = model
        self.kv_caches = list(kv_caches)
        scheduler, memory = config.scheduler, kv_caches[0][0].device
        max_num_seqs = scheduler.max_num_seqs
        max_num_tokens = max(scheduler.max_num_batched_tokens, max_num_seqs)
        max_blocks = cdiv(scheduler.max_model_len, config.cache.block_size)
        self.sizes = padding_sizes(max_num_seqs)
        self.records = memory.type == "cuda"
        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=memory)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=memory)
        self._slot_mapping = torch.zeros(max_num_tokens, dtype=torch.int64, device=memory)
        self._logits_rows = torch.zeros(max_num_tokens, dtype=torch.int64, device=memory)
        self._query_start_loc = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=memory)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=memory)
        self._block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=memory)
        self._every_row = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=memory)
        self._graphs: dict[
            int, tuple[torch.cuda.CUDAGraph, torch.Tensor]
        ] = {}  # of each size: with what it returns
        self._pool = (
            torch.cuda.graph_pool_handle() if self.records else None
        )  # one memory for all: one runs at a time

    def load(self, step: StepInput) -> StepInput:
        """The same step in the buffers. No copy waits for the device."""
        num_tokens, metadata = len(step.input_ids), step.attention
        num_seqs, width = metadata.block_tables.shape
        tables = self._block_tables[:num_seqs, :width]
        loaded = AttentionMetadata(
            query_start_loc=self._query_start_loc[: num_seqs + 1].copy_(
                metadata.query_start_loc, non_blocking=True
            ),
            seq_lens=self._seq_lens[:num_seqs].copy_(metadata.seq_lens, non_blocking=True),
            block_tables=tables.copy_(metadata.block_tables, non_blocking=True),
            slot_mapping=self._slot_mapping[:num_tokens].copy_(metadata.slot_mapping, non_blocking=True),
        )
        return replace(
            step,
            input_ids=self._input_ids[:num_tokens].copy_(step.input_ids, non_blocking=True),
            positions=self._positions[:num_tokens].copy_(step.positions, non_blocking=True),
            attention=loaded,
            logits_rows=self._logits_rows[: len(step.logits_rows)].copy_(step.logits_rows, non_blocking=True),
        )

    def __call__(self, step: StepInput, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """A loaded step -> [T, C], which the next call may overwrite."""
        num_tokens, num_seqs = len(step.input_ids), len(step.attention.seq_lens)
        if num_tokens == num_seqs and inputs_embeds is None:
            return self._decode(num_seqs)[:num_seqs]
        return self.model.forward(
            step.input_ids, step.positions, self.kv_caches, step.attention, inputs_embeds
        )

    def _decode(self, num_seqs: int) -> torch.Tensor:
        """One token a sequence, out of the buffers -> [padded size, C]."""
        size = padded_size(num_seqs, self.sizes)
        self._input_ids[num_seqs:size] = 0
        self._positions[num_seqs:size] = 0
        self._slot_mapping[num_seqs:size] = NO_SLOT
        self._seq_lens[num_seqs:size] = 0
        if not self.records:
            return self._forward(size)
        if size not in self._graphs:
            self._graphs[size] = self._record(size)
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden

    def _forward(self, size: int) -> torch.Tensor:
        metadata = AttentionMetadata(
            query_start_loc=self._every_row[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._block_tables[:size],
            slot_mapping=self._slot_mapping[:size],
        )
        return self.model.forward(self._input_ids[:size], self._positions[:size], self.kv_caches, metadata)

    def _record(self, size: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Run once so that libraries have set themselves up, and again for the recording. K and V come out the same."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._forward(size)
        return graph, hidden
