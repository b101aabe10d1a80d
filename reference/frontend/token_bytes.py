"""The bytes a token stands for. A token can be a part of a character, which no decoder can show as text."""

from __future__ import annotations

import json
import re
from functools import cache

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes by token id, for byte-level vocabularies (GPT-2's) and for those with byte fallback (SentencePiece)."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(backend.to_str()).get("decoder"))

    def of(self, token_id: int) -> bytes:
        """Empty for an id that stands for nothing."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            table = byte_level_alphabet()
            # A character outside the alphabet stands for itself.
            return b"".join(bytes([table[c]]) if c in table else c.encode() for c in token)
        match = _BYTE.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else str(token).replace("▁", " ").encode()


@cache
def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level BPE: printable bytes stand for themselves, the others follow 255."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
