"""How much of a prompt is in the cache already?

`cached` maps block hashes to physical blocks, `hashes` are those of the prompt's full blocks. Return the blocks that
can be reused: the longest row of hits from the start, and never the whole prompt. The last token must be computed
again, since its logits are what the first new token is drawn from.
"""

HINTS = (
    "A hit behind a miss is of no use: its K and V are there, but those before it are not.",
    "Of a prompt of exactly two full blocks only one can be reused: how many full blocks lie before the last token?",
)


def computed_blocks(
    hashes: list[bytes], cached: dict[bytes, int], num_tokens: int, block_size: int
) -> list[int]:
    raise NotImplementedError
