"""The page table of the KV cache: quotient and remainder, exactly as an MMU does it."""


def slot_mapping(block_table: list[int], block_size: int, start: int, end: int) -> list[int]:
    slots = []
    for position in range(start, end):
        block, offset = block_table[position // block_size], position % block_size
        slots.append(block * block_size + offset)
    return slots
