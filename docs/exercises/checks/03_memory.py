from reference.frontend.learn import expect


def check_a_block_of_the_embedded_model(exercise):
    # SmolLM2-135M: 30 layers, 3 KV heads of 64, float32
    expect("block_bytes(30, 3, 64, 16, 4)", exercise.block_bytes(30, 3, 64, 16, 4), 737_280)


def check_a_block_of_llama_2_13b_in_float16(exercise):
    expect("block_bytes(40, 40, 128, 16, 2)", exercise.block_bytes(40, 40, 128, 16, 2), 13_107_200)


def check_requests_take_whole_blocks_and_the_null_block_is_nobodys(exercise):
    got = exercise.num_requests(512 * 1024**2, 737_280, 16, 500)
    expect("num_requests(512 MiB, 737280, 16, 500)", got, (728 - 1) // 32)
    expect("num_requests(10 blocks, of 16 tokens, 17 each)", exercise.num_requests(10 * 64, 64, 16, 17), 4)
