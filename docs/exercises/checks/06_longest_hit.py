from reference.frontend.learn import expect

HASHES = [b"a", b"b", b"c"]


def check_hits_count_from_the_start(exercise):
    got = exercise.computed_blocks(HASHES, {b"a": 7, b"b": 3}, 14, 4)
    expect("hits of a prompt of 14 tokens, blocks a and b cached", got, [7, 3])


def check_a_hit_behind_a_miss_is_of_no_use(exercise):
    expect("block b is not cached", exercise.computed_blocks(HASHES, {b"a": 7, b"c": 5}, 14, 4), [7])
    expect("block a is not cached", exercise.computed_blocks(HASHES, {b"b": 3, b"c": 5}, 14, 4), [])


def check_the_last_token_is_always_computed(exercise):
    everything = {b"a": 7, b"b": 3, b"c": 5}
    expect("all of 12 tokens are cached", exercise.computed_blocks(HASHES, everything, 12, 4), [7, 3])
    expect("12 of 13 tokens are cached", exercise.computed_blocks(HASHES, everything, 13, 4), [7, 3, 5])
