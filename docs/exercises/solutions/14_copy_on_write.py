"""`KVCacheManager._copy_on_write`: nine copies for ten sequences, and the full blocks stay shared."""


def block_to_write(table: list[int], position: int, block_size: int, ref_count: dict[int, int], take_block):
    index = position // block_size
    source = table[index]
    if ref_count[source] == 1:
        return source, None
    table[index] = take_block()
    ref_count[source] -= 1
    return table[index], source
