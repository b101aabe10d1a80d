from reference.frontend.learn import expect


def check_only_full_blocks_have_a_hash(exercise):
    for num_tokens, num_hashes in ((3, 0), (4, 1), (11, 2)):
        got = len(exercise.block_hashes(list(range(num_tokens)), 4))
        expect(f"len(block_hashes of {num_tokens} tokens, blocks of 4)", got, num_hashes)


def check_equal_beginnings_have_equal_hashes(exercise):
    first, second = (exercise.block_hashes([1, 2, 3, 4, 5, 6, 7, 8, last], 4) for last in (9, 10))
    assert first == second, "Two prompts that share eight tokens must share two blocks of four."


def check_equal_blocks_behind_different_beginnings_do_not(exercise):
    first = exercise.block_hashes([1, 1, 1, 1, 5, 6, 7, 8], 4)
    second = exercise.block_hashes([2, 2, 2, 2, 5, 6, 7, 8], 4)
    assert first[1] != second[1], (
        "The second blocks hold equal tokens, but their K and V saw different tokens before them: "
        "shared, one request would read the other's past."
    )


def check_a_salt_keeps_tenants_apart_in_every_block(exercise):
    tokens = list(range(12))
    ours, theirs, nobody = (exercise.block_hashes(tokens, 4, salt) for salt in ("ours", "theirs", None))
    for index, hashes in enumerate(zip(ours, theirs, nobody, strict=True)):
        assert len(set(hashes)) == 3, f"Block {index} has the same hash under two salts."
