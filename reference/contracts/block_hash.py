"""The name of a full block in the prefix cache.

A block's K and V depend on every token before it, so its hash must too: SHA-256 over the parent block's hash, the
block's own tokens, and typed extra keys. Two blocks with equal tokens and different prefixes must never be shared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ROOT_HASH = hashlib.sha256(b"twinfer prefix cache").digest()  # parent of every first block

ExtraKey = tuple[str, str]  # (kind, value): kinds keep a salt and an adapter of one name apart


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = ()) -> bytes:
    """Hash of a full block (32 bytes). Every part has a fixed or written length, so no two inputs read alike."""
    digest = hashlib.sha256(parent)
    digest.update(array("i", token_ids).tobytes())
    for kind, value in extra_keys:
        for part in (kind.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def hash_embeds(embeds: np.ndarray) -> str:
    """Digest of a prompt that came as vectors: float32 [P, C], C-contiguous. The shape counts as well as the bytes."""
    digest = hashlib.sha256(array("q", embeds.shape).tobytes())
    digest.update(embeds.data)
    return digest.hexdigest()


def extra_keys(
    block_index: int, cache_salt: str | None, embeds_digest: str | None = None
) -> tuple[ExtraKey, ...]:
    """Extra keys of one block: a salt, and the digest of a prompt that came as embeddings.

    They enter the first block only: the chain carries them to all later ones.
    """
    if block_index:
        return ()
    keys = (("salt", cache_salt), ("embeds", embeds_digest))
    return tuple((kind, value) for kind, value in keys if value is not None)
