"""A chain: what enters the first block is carried into all later ones, so the salt is needed only there."""

import hashlib

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
    hashes: list[bytes] = []
    parent = ROOT
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        extra = (b"salt", salt.encode()) if start == 0 and salt is not None else ()
        parent = digest(parent, tokens_as_bytes(token_ids[start : start + block_size]), *extra)
        hashes.append(parent)
    return hashes
