"""A block is free when its count falls to zero, and only then; the engine asserts the rest in `BlockPool`."""


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
        if self.ref_count[block] == 0:
            raise ValueError(f"block {block} is given back more often than it was taken")
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            self.free.append(block)
