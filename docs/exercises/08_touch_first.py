"""Take hits before you take new blocks.

A block that nobody holds lies in the free queue even while the prefix cache can find it. An allocation needs the blocks
it has hit *and* some fresh ones. Mend `allocate`: it hands out a block that it has just promised to reuse. And if the
blocks do not suffice, it must return None and change nothing. `pool` is the engine's own BlockPool; the methods you
need are `touch`, `get_new_blocks` and `get_num_free_blocks`, and its `ref_count`.
"""

HINTS = (
    "Fresh blocks come from the head of the free queue. Where does a hit that nobody holds lie?",
    "touch takes a hit out of the queue: do it first.",
    "A hit without a holder uses up a free block as well: count those before you take anything.",
)


def allocate(pool, hits: list[int], num_fresh: int) -> list[int] | None:
    if num_fresh > pool.get_num_free_blocks():
        return None
    fresh = pool.get_new_blocks(num_fresh)
    pool.touch(hits)
    return [*hits, *fresh]
