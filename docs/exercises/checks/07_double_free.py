from reference.frontend.learn import expect


def check_a_shared_block_stays_until_its_last_holder_leaves(exercise):
    pool = exercise.Pool(3)
    block = pool.take()
    pool.share(block)
    pool.give_back(block)
    assert block not in pool.free, f"Block {block} is free although somebody still holds it."
    pool.give_back(block)
    assert pool.free.count(block) == 1, f"Block {block} is {pool.free.count(block)} times in the free list."


def check_nobody_gets_a_block_that_another_holds(exercise):
    pool = exercise.Pool(3)
    block = pool.take()
    pool.share(block)
    pool.give_back(block)
    pool.give_back(block)
    taken = [pool.take() for _ in range(3)]
    expect("three blocks taken from a pool of three", sorted(taken), [0, 1, 2])


def check_giving_back_too_often_is_refused(exercise):
    pool = exercise.Pool(2)
    block = pool.take()
    pool.give_back(block)
    try:
        pool.give_back(block)
    except ValueError:
        expect("the free list after that", sorted(pool.free), [0, 1])
    else:
        raise AssertionError("Nobody holds the block, and still it can be given back: raise ValueError.")
