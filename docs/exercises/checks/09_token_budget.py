from reference import TIER
from reference.contracts.request import EngineCoreRequest, Request
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput
from reference.frontend.learn import expect
from tests.factories import make_config


def check_decodes_get_one_token_each(exercise):
    got = exercise.schedule({"a": (9, 10), "b": (40, 41)}, 16)
    expect("schedule({a: 9 of 10, b: 40 of 41}, budget 16)", got, {"a": 1, "b": 1})


def check_a_prefill_takes_what_is_left(exercise):
    got = exercise.schedule({"a": (9, 10), "b": (0, 100), "c": (0, 5)}, 16)
    expect("schedule({a: 9 of 10, b: 0 of 100, c: 0 of 5}, budget 16)", got, {"a": 1, "b": 15})


def check_the_chunk_goes_on_in_the_next_step(exercise):
    expect("schedule({b: 15 of 100}, budget 16)", exercise.schedule({"b": (15, 100)}, 16), {"b": 16})


def check_it_agrees_with_the_engine_when_blocks_are_plenty(exercise):
    scheduler = TIER.make_scheduler(
        make_config(max_num_batched_tokens=24, num_usable_blocks=99, block_size=16)
    )
    for i, size in enumerate((10, 30, 3, 50)):
        request = EngineCoreRequest(
            f"r{i}", tuple(range(100 * i, 100 * i + size)), SamplingParams(), 0, (i, 0)
        )
        scheduler.add_request(Request.from_engine_core_request(request))
    for _ in range(8):
        requests = {r.request_id: (r.num_computed_tokens, r.num_tokens) for r in scheduler.requests.values()}
        schedule = scheduler.schedule()
        wanted = schedule.num_scheduled_tokens
        expect(f"schedule({requests}, budget 24)", exercise.schedule(requests, 24), wanted)
        caught_up = [name for name, count in wanted.items() if requests[name][0] + count == requests[name][1]]
        scheduler.update_from_output(schedule, ModelRunnerOutput({name: [7] for name in caught_up}))
