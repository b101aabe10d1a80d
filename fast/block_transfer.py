"""Blocks on the move. Twin: [`reference/block_transfer.py`](../reference/block_transfer.py).

What differs: each kind of move is one gather and one scatter a layer for all blocks at once, instead of a copy for
each. That is allowed because no move of one kind reads what another of its kind wrote: a copy's source was filled in
an earlier step, and a pool never hands out a block twice in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fast import kernels
from reference.contracts.schedule import SchedulerOutput


class BlockTransfer:
    """Owns the host pool of all layers.

    Args:
        kv_caches: K and V of each layer, each [N, B, Hkv, D].
        num_host_blocks: blocks of the host pool; its block 0 is the null block there too.
    """

    def __init__(self, kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]], num_host_blocks: int) -> None:
        # [N, B, Hkv, D], K and V of every layer
        self.device_caches = [cache for layer in kv_caches for cache in layer]
        self.host_caches = [
            kernels.empty_host_cache(num_host_blocks + 1, *cache.shape[1:]) for cache in self.device_caches
        ]

    def execute(self, schedule: SchedulerOutput) -> None:
        """Do the step's swap-outs, copies and swap-ins, one kind after the other."""
        if not (schedule.swap_outs or schedule.block_copies or schedule.swap_ins):
            return
        self._swap(self.device_caches, self.host_caches, [(s.device, s.host) for s in schedule.swap_outs])
        self._copy([(copy.source, copy.target) for copy in schedule.block_copies])
        self._swap(self.host_caches, self.device_caches, [(s.host, s.device) for s in schedule.swap_ins])

    def _swap(
        self, sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: list[tuple[int, int]]
    ) -> None:
        """targets[to] = sources[from], in every cache."""
        if not pairs:
            return
        block_mapping = kernels.place(torch.tensor(pairs))  # [moves, 2]
        for source, target in zip(sources, targets, strict=True):
            kernels.swap_blocks(source, target, block_mapping)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        block_mapping = kernels.place(torch.tensor(pairs))  # [moves, 2]
        for k_cache, v_cache in zip(self.device_caches[::2], self.device_caches[1::2], strict=True):
            kernels.copy_blocks(k_cache, v_cache, block_mapping)
