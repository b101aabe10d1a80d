from docs.exercises.checks import cuda


def check_every_lane_gets_the_sum(exercise):
    numbers = [float(i % 7) for i in range(32)]
    got = cuda.run(exercise.KERNEL, "warp_sum", numbers, 32, outputs="threads")
    assert got == [sum(numbers)] * 32, f"the lanes hold {got[:4]}..., the sum is {sum(numbers)}"


def check_the_order_of_threads_does_not_matter(exercise):
    numbers = [float(i) for i in range(32)]
    for seed in (1, 2, 3):
        got = cuda.run(exercise.KERNEL, "warp_sum", numbers, 32, outputs="threads", seed=seed)
        assert got == [sum(numbers)] * 32, f"in order {seed} the lanes hold {got[:4]}..."


def check_no_shared_memory_and_no_barrier(exercise):
    for word in ("__shared__", "SHARED_ARRAY", "__syncthreads"):
        assert word not in exercise.KERNEL, f"{word} is not needed: lanes read each other's registers."
