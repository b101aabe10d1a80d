"""What a slot does after its request has ended is the whole difference."""


def static_steps(lengths: list[int], slots: int) -> int:
    return sum(max(lengths[start : start + slots]) for start in range(0, len(lengths), slots))


def continuous_steps(lengths: list[int], slots: int) -> int:
    free_at = [0] * slots  # the step in which each slot becomes free
    for length in lengths:
        first = free_at.index(min(free_at))
        free_at[first] += length
    return max(free_at)
