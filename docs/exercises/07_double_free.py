"""Find the double free.

This pool counts the holders of each block, but something is wrong: after two requests that share a block have both
ended, a third and a fourth are given the same block at once. Mend `Pool`.
"""

HINTS = (
    "Watch ref_count of the shared block while the first of its holders leaves.",
    "When may a block go back into the free list?",
    "A block whose holder is gone twice is a bug of the caller: say so instead of going on.",
)


class Pool:
    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.ref_count = [0] * num_blocks

    def take(self) -> int:
        block = self.free.pop(0)
        self.ref_count[block] = 1
        return block

    def share(self, block: int) -> None:
        self.ref_count[block] += 1

    def give_back(self, block: int) -> None:
        """Raises ValueError when nobody holds the block."""
        self.ref_count[block] -= 1
        self.free.append(block)
