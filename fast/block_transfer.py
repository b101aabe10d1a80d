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
        device, host = self.device_caches, self.host_caches
        outs, copies, ins = schedule.swap_outs, schedule.block_copies, schedule.swap_ins
        _move(device, [swap.device for swap in outs], host, [swap.host for swap in outs])
        _move(device, [copy.source for copy in copies], device, [copy.target for copy in copies])
        _move(host, [swap.host for swap in ins], device, [swap.device for swap in ins])


def _move(
    sources: list[torch.Tensor],
    source_blocks: list[int],
    targets: list[torch.Tensor],
    target_blocks: list[int],
) -> None:
    """targets[target_blocks] = sources[source_blocks], in every cache."""
    if not source_blocks:
        return
    from_blocks, to_blocks = torch.tensor(source_blocks), torch.tensor(target_blocks)  # [moves]
    for source, target in zip(sources, targets, strict=True):
        target.index_copy_(0, to_blocks, source.index_select(0, from_blocks))  # [moves, B, Hkv, D]
