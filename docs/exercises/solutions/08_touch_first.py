"""Count first, so that a refusal changes nothing; then touch, so that no hit is evicted for a fresh block."""


def allocate(pool, hits: list[int], num_fresh: int) -> list[int] | None:
    num_unheld = sum(pool.ref_count[block] == 0 for block in hits)
    if num_fresh + num_unheld > pool.get_num_free_blocks():
        return None
    pool.touch(hits)
    return [*hits, *pool.get_new_blocks(num_fresh)]
