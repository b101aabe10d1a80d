"""Twin of [`reference/block_pool.py`](../reference/block_pool.py).

What differs: the free queue is an intrusive doubly linked list. The links of block b are `next_free[b]` and
`prev_free[b]`, with block 0 (never free) as the sentinel at both ends, so taking a block out of the middle (a hit), and
joining whole chains at the head or the back, touch a few integers and allocate nothing. The hash map stores a bare
block id as long as a hash is unique, which it nearly always is.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """All blocks of the KV cache, `num_blocks` with the null block included."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self.block_hash: list[bytes | None] = [None] * num_blocks
        self.next_free = [*range(1, num_blocks), 0]  # next_free[0] is the head
        self.prev_free = [num_blocks - 1, *range(num_blocks - 1)]  # prev_free[0] is the tail
        self.num_free_blocks = num_blocks - 1
        # one block, or several in order of insertion
        self.cached_blocks: dict[bytes, int | dict[int, None]] = {}
        self.evicted: list[int] = []

    def get_num_free_blocks(self) -> int:
        return self.num_free_blocks

    def get_free_order(self) -> list[int]:
        """The free queue from head to tail."""
        order = []
        block = self.next_free[0]
        while block:
            order.append(block)
            block = self.next_free[block]
        return order

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Take blocks from the head of the free queue; their old content is evicted from the prefix cache."""
        assert num_blocks <= self.num_free_blocks, "the caller checks that enough blocks are free"
        blocks = []
        block = self.next_free[0]
        for _ in range(num_blocks):
            blocks.append(block)
            self.ref_count[block] = 1
            if self.block_hash[block] is not None:
                self.uncache_block(block)
                self.evicted.append(block)
            block = self.next_free[block]
        self._link(0, block)  # the whole run leaves the queue at once
        self.num_free_blocks -= num_blocks
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """One more holder for each block; one that nobody held leaves the free queue, content and hash intact."""
        for block in blocks:
            if self.ref_count[block] == 0:
                self._link(self.prev_free[block], self.next_free[block])
                self.num_free_blocks -= 1
            self.ref_count[block] += 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """One holder less for each block, in the given order (the table's last block first).

        Blocks that nobody holds any more: those without a hash form one batch that keeps this order at the very head
        of the queue; those with a hash join the back, in this order.
        """
        last_unhashed = 0  # the batch at the head ends here
        for block in blocks:
            self.ref_count[block] -= 1
            if self.ref_count[block] > 0:
                continue
            assert self.ref_count[block] == 0, f"block {block} is freed more often than it was taken"
            self.num_free_blocks += 1
            if self.block_hash[block] is None:
                before, after = last_unhashed, self.next_free[last_unhashed]
                last_unhashed = block
            else:
                before, after = self.prev_free[0], 0
            self._link(before, block)
            self._link(block, after)

    def _link(self, before: int, after: int) -> None:
        self.next_free[before] = after
        self.prev_free[after] = before

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Let the prefix cache find `block` under its hash. Several blocks may share one hash."""
        assert self.block_hash[block] is None, f"block {block} already has a hash"
        self.block_hash[block] = block_hash
        known = self.cached_blocks.setdefault(block_hash, block)
        if isinstance(known, dict):
            known[block] = None
        elif known != block:
            self.cached_blocks[block_hash] = {known: None, block: None}

    def uncache_block(self, block: int) -> None:
        """Forget the block's hash, if it has one; other blocks with the same hash stay findable."""
        block_hash = self.block_hash[block]
        if block_hash is None:
            return
        self.block_hash[block] = None
        known = self.cached_blocks[block_hash]
        if isinstance(known, dict) and len(known) > 1:
            del known[block]
        else:
            del self.cached_blocks[block_hash]

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """The first inserted of the blocks with this hash."""
        known = self.cached_blocks.get(block_hash)
        return next(iter(known)) if isinstance(known, dict) else known

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes; refused (False) while any block is held."""
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        self.cached_blocks.clear()
        self.block_hash = [None] * self.num_blocks
        return True

    def check_integrity(self) -> None:
        """Every block is null, held or free, the list is linked both ways, and hashes are consistent both ways."""
        free = self.get_free_order()
        assert len(free) == len(set(free)) == self.num_free_blocks, "the free list and its length disagree"
        for before, after in zip([0, *free], [*free, 0], strict=True):
            assert self.next_free[before] == after and self.prev_free[after] == before, (
                "the free list is broken"
            )
        assert self.ref_count[0] == 0 and self.block_hash[0] is None, "the null block is in use"
        held = {block for block in range(1, self.num_blocks) if self.ref_count[block] > 0}
        assert held.isdisjoint(free), f"held and free at once: {sorted(held & set(free))}"
        assert len(held) + len(free) + 1 == self.num_blocks, "a block is neither held nor free"
        found = {}
        for key, known in self.cached_blocks.items():
            assert known, "an empty entry was left in the hash map"
            found.update(dict.fromkeys(known if isinstance(known, dict) else (known,), key))
        known_hashes = {block: key for block, key in enumerate(self.block_hash) if key is not None}
        assert found == known_hashes, "the hash map and the blocks disagree"
