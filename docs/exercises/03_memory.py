"""How many requests fit into the memory of the KV cache?

For each token a model keeps K and V: in every layer, for every KV head, `head_dim` numbers each. Write the bytes of a
block, and how many requests of `tokens_each` tokens `memory` bytes hold when each takes whole blocks and one block
(the null block) is never handed out.
"""

HINTS = (
    "K and V: a factor of two that is easily forgotten. Query heads do not count.",
    "Blocks first, whole ones; then requests, each of whole blocks.",
)


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, bytes_per_number: int) -> int:
    raise NotImplementedError


def num_requests(memory: int, bytes_of_a_block: int, block_size: int, tokens_each: int) -> int:
    raise NotImplementedError
