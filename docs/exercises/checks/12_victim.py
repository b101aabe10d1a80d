from reference.frontend.learn import expect

RANK = {"a": (5, 0), "b": (0, 1), "c": (0, 2), "d": (0, 3), "e": (9, 4)}


def check_fcfs_takes_the_last_and_puts_it_at_the_head(exercise):
    got = exercise.preempt(["a", "b", "c"], ["d", "e"], "fcfs", RANK)
    expect("preempt([a, b, c], waiting [d, e], fcfs)", got, ("c", ["c", "d", "e"]))


def check_priority_takes_the_least_important(exercise):
    got = exercise.preempt(["a", "b", "c"], ["d", "e"], "priority", RANK)
    expect("preempt([a, b, c], waiting [d, e], priority)", got, ("a", ["d", "a", "e"]))


def check_among_equals_the_later_arrival_gives_way(exercise):
    got = exercise.preempt(["c", "b"], ["d"], "priority", RANK)
    expect("preempt([c, b], waiting [d], priority)", got, ("c", ["c", "d"]))


def check_the_arguments_stay_as_they_are(exercise):
    running, waiting = ["a", "b"], ["d"]
    exercise.preempt(running, waiting, "fcfs", RANK)
    assert (running, waiting) == (["a", "b"], ["d"]), "preempt has changed a list that belongs to its caller."
