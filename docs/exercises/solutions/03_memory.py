"""The arithmetic behind `twinfer bench memory --model DIR`."""


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, bytes_per_number: int) -> int:
    return 2 * layers * kv_heads * head_dim * block_size * bytes_per_number


def num_requests(memory: int, bytes_of_a_block: int, block_size: int, tokens_each: int) -> int:
    usable_blocks = memory // bytes_of_a_block - 1
    blocks_each = -(-tokens_each // block_size)
    return usable_blocks // blocks_each
