"""How many blocks does a sequence need?

The KV cache is cut into blocks of `block_size` tokens. Write two functions: how many blocks a sequence of `num_tokens`
tokens occupies, and how many slots of the last one stay empty. (The article divides and drops the remainder.)
"""

HINTS = (
    "17 tokens do not fit into one block of 16.",
    "Rounding up without floating point: add block_size - 1 before you divide.",
)


def blocks_needed(num_tokens: int, block_size: int) -> int:
    raise NotImplementedError


def empty_slots(num_tokens: int, block_size: int) -> int:
    raise NotImplementedError
