"""Write the name of a block in the prefix cache.

K and V of a token depend on all tokens before it. So a block's hash covers the hash of the block before it, then its
own tokens, then extra keys such as a tenant's salt. Return the hashes of all *full* blocks of a prompt. `digest` is
given and takes any sequence of byte strings; ROOT is the parent of every first block. A salt, if there is one, enters
the first block only (why is that enough?). (The article hashes each block by itself.)
"""

import hashlib

HINTS = (
    "The hash of block i goes into the hash of block i + 1.",
    "Only full blocks have a name: a half-filled one is still going to change.",
)

ROOT = b"root"


def digest(*parts: bytes) -> bytes:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.digest()


def tokens_as_bytes(token_ids: list[int]) -> bytes:
    return b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)


def block_hashes(token_ids: list[int], block_size: int, salt: str | None = None) -> list[bytes]:
    raise NotImplementedError
