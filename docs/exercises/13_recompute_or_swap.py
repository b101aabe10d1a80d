"""What does a preemption cost?

A victim with `num_computed` computed tokens comes back later. If it is recomputed, its tokens are computed again, but
for the full blocks that the prefix cache still has (`num_cached_blocks` from the start; and the last known token is
always computed). If it is swapped, its blocks are copied to the host and back, but for those that the cache has on the
way back. Return the tokens to compute again, and the blocks to copy in both directions together.
"""

HINTS = (
    "Recompute: num_computed minus what the cached blocks hold.",
    "Swap out copies every block that holds a computed token, the partly filled one too.",
    "Swap in copies only what the cache does not have.",
)


def recompute_cost(num_computed: int, num_cached_blocks: int, block_size: int) -> int:
    raise NotImplementedError


def swap_cost(num_computed: int, num_cached_blocks: int, block_size: int) -> int:
    raise NotImplementedError
