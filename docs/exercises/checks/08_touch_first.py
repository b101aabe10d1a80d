from reference.block_pool import BlockPool
from reference.frontend.learn import expect


def pool_with_a_cached_block():
    """Blocks 1 and 2 are cached and free; 1 is at the head of the queue, then 2, then 3."""
    pool = BlockPool(4)
    for block, name in zip(pool.get_new_blocks(2), (b"a", b"b"), strict=True):
        pool.cache_block(block, name)
    (third,) = pool.get_new_blocks(1)
    pool.free_blocks([1, 2])
    pool.cache_block(third, b"c")
    pool.free_blocks([third])
    return pool


def check_a_hit_is_not_handed_out_as_a_fresh_block(exercise):
    pool = pool_with_a_cached_block()
    table = exercise.allocate(pool, [1], 2)
    expect("allocate(hits=[1], num_fresh=2)", table, [1, 2, 3])
    assert pool.get_cached_block(b"a") == 1, "The hit was evicted: its content is gone."
    pool.check_integrity()


def check_hits_without_a_holder_use_up_free_blocks(exercise):
    pool = pool_with_a_cached_block()
    before = (pool.get_free_order(), list(pool.ref_count), list(pool.block_hash))
    expect("allocate(hits=[1], num_fresh=3) of three free blocks", exercise.allocate(pool, [1], 3), None)
    after = (pool.get_free_order(), list(pool.ref_count), list(pool.block_hash))
    assert before == after, "A refused allocation has changed the pool."


def check_hits_that_others_hold_do_not(exercise):
    pool = pool_with_a_cached_block()
    pool.touch([1])
    expect("allocate(hits=[1], num_fresh=2), 1 is held", exercise.allocate(pool, [1], 2), [1, 2, 3])
    expect("holders of block 1", pool.ref_count[1], 2)
