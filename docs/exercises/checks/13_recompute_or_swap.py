from reference.frontend.learn import expect


def check_recomputing_costs_what_the_cache_lacks(exercise):
    expect("recompute_cost(50, 0, 16)", exercise.recompute_cost(50, 0, 16), 50)
    expect("recompute_cost(50, 3, 16)", exercise.recompute_cost(50, 3, 16), 2)


def check_swapping_copies_out_and_in(exercise):
    expect("swap_cost(50, 0, 16)", exercise.swap_cost(50, 0, 16), 4 + 4)
    expect("swap_cost(50, 3, 16)", exercise.swap_cost(50, 3, 16), 4 + 1)
    expect("swap_cost(48, 3, 16)", exercise.swap_cost(48, 3, 16), 3 + 0)
