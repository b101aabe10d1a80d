import random

from reference.block_pool import BlockPool
from reference.frontend.learn import expect


def check_the_unhashed_tail_comes_first(exercise):
    expect(
        "free([8, 9], [4, 5, 6], hashed={4, 5})", exercise.free([8, 9], [4, 5, 6], {4, 5}), [6, 8, 9, 5, 4]
    )


def check_several_unhashed_blocks_keep_their_order(exercise):
    expect("free([8], [4, 5, 6], hashed={4})", exercise.free([8], [4, 5, 6], {4}), [6, 5, 8, 4])


def check_random_tables_agree_with_the_block_pool(exercise):
    for seed in range(50):
        rng = random.Random(seed)
        pool = BlockPool(12)
        table = pool.get_new_blocks(rng.randint(1, 8))
        hashed = {block for block in table if rng.random() < 0.6}
        for block in hashed:
            pool.cache_block(block, bytes([block]))
        queue = pool.get_free_order()
        got = exercise.free(list(queue), list(table), set(hashed))
        pool.free_blocks(list(reversed(table)))
        expect(f"free({queue}, {table}, hashed={hashed})", got, pool.get_free_order())
