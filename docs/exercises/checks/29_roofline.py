def close(call, got, wanted):
    assert abs(got - wanted) <= 1e-9 * abs(wanted), f"{call} gives {got}, but {wanted} is right."


def check_one_request_is_limited_by_memory(exercise):
    got = exercise.step_floor(100, 0.5, 10, 1, bandwidth=10.0, peak=1000.0)
    close("step_floor(100 weights of half a byte, 10 bytes of K and V, batch 1)", got, 6.0)


def check_weights_are_read_once_and_k_and_v_for_each_sequence(exercise):
    got = exercise.step_floor(100, 0.5, 10, 4, bandwidth=10.0, peak=1000.0)
    close("step_floor(the same, batch 4)", got, 9.0)


def check_a_large_batch_is_limited_by_arithmetic(exercise):
    got = exercise.step_floor(100, 0.5, 0, 100, bandwidth=10.0, peak=1000.0)
    close("step_floor(the same without K and V, batch 100)", got, 20.0)


def check_where_the_two_meet(exercise):
    close("balanced_batch(0.5, 10, 1000)", exercise.balanced_batch(0.5, 10.0, 1000.0), 25.0)
    close("balanced_batch(4, 10, 1000)", exercise.balanced_batch(4.0, 10.0, 1000.0), 200.0)
