from docs.exercises.checks import cuda

NUMBERS = [float((37 * i) % 128) for i in range(128)]
WANTED = [max(NUMBERS[:64]), max(NUMBERS[64:])]


def check_two_blocks_give_their_maxima_in_any_order_of_threads(exercise):
    for seed in range(6):
        got = cuda.run(exercise.KERNEL, "block_max", NUMBERS, 64, seed=seed)
        assert got == WANTED, f"in order {seed} the blocks say {got}, their maxima are {WANTED}"


def check_the_tree_is_still_there(exercise):
    assert "scratch" in exercise.KERNEL, "Mend the tree, do not replace it."
    assert exercise.KERNEL.count("for") == 1, "One loop over the levels is enough."
