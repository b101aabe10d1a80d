"""Physical blocks: who may have the next one, and which content can still be found.

A block is in exactly one of three states:

    null    block 0: stands for "no block", never handed out, freed or counted
    held    reference count = number of block tables it stands in
    free    reference count 0, in the free queue; it keeps its hash, and so can be hit, until it is handed out again

The free queue is the eviction policy. Its head is handed out next; freed blocks that the prefix cache can find go to
the back (least recently used first), the others to the front, because nothing is lost by overwriting them.
(vLLM: `vllm/v1/core/block_pool.py`.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """All blocks of the KV cache, `num_blocks` with the null block included."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        self.block_hash: list[bytes | None] = [None] * num_blocks
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        # hash -> blocks that hold it, first inserted first
        self.cached_blocks: dict[bytes, dict[int, None]] = {}
        self.evicted: list[int] = []  # blocks whose content was given up; whoever reads the list empties it

    def get_num_free_blocks(self) -> int:
        return len(self.free_queue)

    def get_free_order(self) -> list[int]:
        """The free queue from head to tail."""
        return list(self.free_queue)

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Take blocks from the head of the free queue; their old content is evicted from the prefix cache."""
        assert num_blocks <= len(self.free_queue), "the caller checks that enough blocks are free"
        blocks = []
        for _ in range(num_blocks):
            block, _ = self.free_queue.popitem(last=False)
            if self.block_hash[block] is not None:
                self.uncache_block(block)
                self.evicted.append(block)
            self.ref_count[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """One more holder for each block; one that nobody held leaves the free queue, content and hash intact."""
        for block in blocks:
            if self.ref_count[block] == 0:
                del self.free_queue[block]
            self.ref_count[block] += 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """One holder less for each block, in the given order (the table's last block first).

        Blocks that nobody holds any more: those without a hash form one batch that keeps this order at the very head
        of the queue; those with a hash join the back, in this order.
        """
        unhashed = []
        for block in blocks:
            assert self.ref_count[block] > 0, f"block {block} is freed more often than it was taken"
            self.ref_count[block] -= 1
            if self.ref_count[block] > 0:
                continue
            self.free_queue[block] = None  # at the back
            if self.block_hash[block] is None:
                unhashed.append(block)
        for block in reversed(unhashed):
            self.free_queue.move_to_end(block, last=False)

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Let the prefix cache find `block` under its hash. Several blocks may share one hash."""
        assert self.block_hash[block] is None, f"block {block} already has a hash"
        self.block_hash[block] = block_hash
        self.cached_blocks.setdefault(block_hash, {})[block] = None

    def uncache_block(self, block: int) -> None:
        """Forget the block's hash, if it has one; other blocks with the same hash stay findable."""
        block_hash = self.block_hash[block]
        if block_hash is None:
            return
        self.block_hash[block] = None
        del self.cached_blocks[block_hash][block]
        if not self.cached_blocks[block_hash]:
            del self.cached_blocks[block_hash]

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """The first inserted of the blocks with this hash."""
        return next(iter(self.cached_blocks.get(block_hash, ())), None)

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes; refused (False) while any block is held."""
        if len(self.free_queue) != self.num_blocks - 1:
            return False
        for block in range(1, self.num_blocks):
            self.uncache_block(block)
        return True

    def check_integrity(self) -> None:
        """Every block is null, held or free, and hashes are consistent both ways."""
        free = self.get_free_order()
        assert len(free) == len(set(free)) == self.get_num_free_blocks(), "a block is in the free queue twice"
        assert 0 not in free and self.ref_count[0] == 0 and self.block_hash[0] is None, (
            "the null block is in use"
        )
        held = {block for block in range(1, self.num_blocks) if self.ref_count[block] > 0}
        assert held.isdisjoint(free), f"held and free at once: {sorted(held & set(free))}"
        assert len(held) + len(free) + 1 == self.num_blocks, "a block is neither held nor free"
        found = {block: key for key, blocks in self.cached_blocks.items() for block in blocks}
        known = {block: key for block, key in enumerate(self.block_hash) if key is not None}
        assert found == known, "the hash map and the blocks disagree"
        assert all(self.cached_blocks.values()), "an empty entry was left in the hash map"
