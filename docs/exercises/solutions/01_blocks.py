"""Rounding up in whole numbers; what is allocated and not used is at most block_size - 1 slots a sequence."""


def blocks_needed(num_tokens: int, block_size: int) -> int:
    return (num_tokens + block_size - 1) // block_size


def empty_slots(num_tokens: int, block_size: int) -> int:
    return blocks_needed(num_tokens, block_size) * block_size - num_tokens
