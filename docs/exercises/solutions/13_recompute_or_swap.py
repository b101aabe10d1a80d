"""With a prefix cache recomputing is often nearly free: one reason why vLLM v1 dropped swapping."""


def recompute_cost(num_computed: int, num_cached_blocks: int, block_size: int) -> int:
    return num_computed - num_cached_blocks * block_size


def swap_cost(num_computed: int, num_cached_blocks: int, block_size: int) -> int:
    num_blocks = -(-num_computed // block_size)
    return num_blocks + (num_blocks - num_cached_blocks)
