"""`KVCacheManager.get_computed_blocks`, without salts and windows."""


def computed_blocks(
    hashes: list[bytes], cached: dict[bytes, int], num_tokens: int, block_size: int
) -> list[int]:
    hits = []
    for block_hash in hashes[: (num_tokens - 1) // block_size]:
        if block_hash not in cached:
            break
        hits.append(cached[block_hash])
    return hits
