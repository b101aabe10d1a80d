from reference.frontend.learn import expect


def sharing(num_sequences, table):
    ref_count = dict.fromkeys(table, num_sequences)
    fresh = iter(range(100, 200))

    def take_block():
        block = next(fresh)
        ref_count[block] = 1
        return block

    return [list(table) for _ in range(num_sequences)], ref_count, take_block


def check_the_copy_takes_the_place_of_the_shared_block(exercise):
    tables, ref_count, take_block = sharing(2, [4, 7])
    expect("the first writer", exercise.block_to_write(tables[0], 5, 4, ref_count, take_block), (100, 7))
    expect("its table", tables[0], [4, 100])
    expect("the other table", tables[1], [4, 7])
    expect("the holders of the old block", ref_count[7], 1)


def check_the_last_holder_writes_in_place(exercise):
    tables, ref_count, take_block = sharing(2, [4, 7])
    exercise.block_to_write(tables[0], 5, 4, ref_count, take_block)
    expect("the last writer", exercise.block_to_write(tables[1], 5, 4, ref_count, take_block), (7, None))


def check_ten_sequences_make_nine_copies(exercise):
    tables, ref_count, take_block = sharing(10, [4, 7])
    sources = [exercise.block_to_write(table, 6, 4, ref_count, take_block)[1] for table in tables]
    expect("copies", sum(source is not None for source in sources), 9)
    assert len({table[1] for table in tables}) == 10, "Two sequences still write to one block."
    expect("holders of the block of the prompt's beginning", ref_count[4], 10)


def check_a_block_of_ones_own_is_written_in_place(exercise):
    expect("alone", exercise.block_to_write([4, 7], 5, 4, {4: 3, 7: 1}, None), (7, None))
