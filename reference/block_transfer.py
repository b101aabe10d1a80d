"""Blocks on the move: what a step does to the KV cache before its forward pass.

    swap-outs     KV cache -> host pool     a preempted request's blocks are saved before anybody overwrites them
    block copies  KV cache -> KV cache      copy-on-write: a sibling gets a block of its own
    swap-ins      host pool -> KV cache     a resumed request gets its blocks back, in other places

The order matters: a block that is swapped out, and freed by it, may be the target of a copy in the same step.
(vLLM: `vllm/worker/cache_engine.py` of v0 for the swaps.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.contracts.schedule import SchedulerOutput


class BlockTransfer:
    """Owns the host pool of all layers.

    Args:
        kv_caches: K and V of each layer, each [N, B, Hkv, D].
        num_host_blocks: blocks of the host pool; its block 0 is the null block there too.
    """

    def __init__(self, kv_caches: Sequence[tuple[np.ndarray, np.ndarray]], num_host_blocks: int) -> None:
        # [N, B, Hkv, D], K and V of every layer
        self.device_caches = [cache for layer in kv_caches for cache in layer]
        self.host_caches = [
            np.zeros((num_host_blocks + 1, *cache.shape[1:]), cache.dtype) for cache in self.device_caches
        ]

    def execute(self, schedule: SchedulerOutput) -> None:
        """Do the step's swap-outs, copies and swap-ins, one after the other."""
        for device, host in zip(self.device_caches, self.host_caches, strict=True):
            for swap in schedule.swap_outs:
                host[swap.host] = device[swap.device]  # [B, Hkv, D]
            for copy in schedule.block_copies:
                device[copy.target] = device[copy.source]  # [B, Hkv, D]
            for swap in schedule.swap_ins:
                device[swap.device] = host[swap.host]  # [B, Hkv, D]
