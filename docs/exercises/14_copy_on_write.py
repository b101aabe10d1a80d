"""Write to a shared block.

Several sequences that grew from one prompt share its blocks. When one of them writes token position `position` and its
block has other holders, it needs a block of its own in that place of its table, with a copy of the content; the old
block has one holder less. The last holder writes in place. Return (block, source): the block to write to, and the
block whose content is to be copied first, or None. (The article appends the copy at the end of the table.)
"""

HINTS = (
    "Which entry of the table does the position fall into?",
    "ref_count above 1: take_block(), replace the entry, count down the old one.",
    "A position in a block that the table does not have yet is no matter of copy-on-write; it does not occur here.",
)


def block_to_write(table: list[int], position: int, block_size: int, ref_count: dict[int, int], take_block):
    """`take_block()` hands out a fresh block with one holder, and enters it in `ref_count`."""
    raise NotImplementedError
