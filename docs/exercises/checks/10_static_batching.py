from reference import TIER
from reference.contracts.request import EngineCoreRequest, Request
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput
from reference.frontend.learn import expect
from tests.factories import make_config

LENGTHS = [2, 10, 3, 3, 9, 1, 4]


def check_static_batches_wait_for_their_longest(exercise):
    expect("static_steps([2, 10, 3, 3, 9, 1, 4], 2)", exercise.static_steps(LENGTHS, 2), 10 + 3 + 9 + 4)


def check_continuous_batching_fills_the_hole_at_once(exercise):
    expect("continuous_steps([2, 10, 3, 3], 2)", exercise.continuous_steps([2, 10, 3, 3], 2), 10)
    expect("continuous_steps([2, 10, 3, 3, 9, 1, 4], 2)", exercise.continuous_steps(LENGTHS, 2), 17)


def check_it_agrees_with_the_scheduler(exercise):
    scheduler = TIER.make_scheduler(make_config(max_num_seqs=3, num_usable_blocks=50, block_size=16))
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(max_tokens=length)
        scheduler.add_request(
            Request.from_engine_core_request(EngineCoreRequest(f"r{i}", (i + 1,), params, 0, (i, 0)))
        )
    steps = 0
    while scheduler.has_unfinished_requests():
        schedule = scheduler.schedule()
        scheduler.update_from_output(
            schedule, ModelRunnerOutput({name: [7] for name in schedule.num_scheduled_tokens})
        )
        steps += 1
    expect("continuous_steps(the same lengths, 3)", exercise.continuous_steps(LENGTHS, 3), steps)
