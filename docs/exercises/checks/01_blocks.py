from reference.contracts.config import cdiv
from reference.frontend.learn import expect


def check_a_full_block_is_one_block(exercise):
    expect("blocks_needed(16, 16)", exercise.blocks_needed(16, 16), 1)
    expect("blocks_needed(0, 16)", exercise.blocks_needed(0, 16), 0)


def check_one_token_more_takes_another_block(exercise):
    expect("blocks_needed(17, 16)", exercise.blocks_needed(17, 16), 2)


def check_all_sizes_agree_with_the_engine(exercise):
    for num_tokens in range(200):
        for block_size in (1, 7, 8, 16, 32):
            call = f"blocks_needed({num_tokens}, {block_size})"
            expect(call, exercise.blocks_needed(num_tokens, block_size), cdiv(num_tokens, block_size))


def check_only_the_last_block_has_empty_slots(exercise):
    for num_tokens, empty in ((16, 0), (17, 15), (31, 1), (0, 0)):
        expect(f"empty_slots({num_tokens}, 16)", exercise.empty_slots(num_tokens, 16), empty)
