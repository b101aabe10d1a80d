from reference.frontend.learn import expect
from reference.input_batch import InputBatch
from tests.factories import make_config


def check_a_position_in_the_first_block(exercise):
    expect("slot_mapping([5], 4, 2, 3)", exercise.slot_mapping([5], 4, 2, 3), [22])


def check_a_range_over_blocks_that_do_not_touch(exercise):
    got = exercise.slot_mapping([7, 2, 9], 4, 2, 10)
    expect("slot_mapping([7, 2, 9], 4, 2, 10)", got, [30, 31, 8, 9, 10, 11, 36, 37])


def check_it_is_what_the_model_runner_writes_to(exercise):
    batch = InputBatch(make_config(block_size=16))
    table = [3, 11, 4, 8]
    wanted = [batch._slot(table, position) for position in range(5, 60)]
    expect("slot_mapping([3, 11, 4, 8], 16, 5, 60)", exercise.slot_mapping(table, 16, 5, 60), wanted)
