from reference.frontend.learn import expect


def check_without_a_threshold_the_first_takes_everything(exercise):
    got = exercise.schedule({"long": (0, 10_000), "short": (0, 20)}, 64, 0)
    expect("schedule(long and short, budget 64, threshold 0)", got, {"long": 64})


def check_with_a_threshold_the_short_one_gets_its_share(exercise):
    got = exercise.schedule({"long": (0, 10_000), "short": (0, 20)}, 64, 32)
    expect("schedule(long and short, budget 64, threshold 32)", got, {"long": 32, "short": 20})


def check_a_lone_request_is_not_slowed_down(exercise):
    expect("schedule(long alone)", exercise.schedule({"long": (0, 10_000)}, 64, 32), {"long": 64})
