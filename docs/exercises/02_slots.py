"""Where do the K and V of a token live?

A block table maps a sequence's logical blocks to physical ones. The cache is one long row of slots: slot
`block * block_size + offset`. Write the slots of token positions `start` to `end` - 1.
"""

HINTS = (
    "Position 19 with blocks of 16 is token 3 of logical block 1.",
    "Quotient and remainder of position and block_size.",
)


def slot_mapping(block_table: list[int], block_size: int, start: int, end: int) -> list[int]:
    raise NotImplementedError
