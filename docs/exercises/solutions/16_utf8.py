"""A decoder with a memory of at most three bytes, instead of the whole text again for each token."""

import codecs


def deltas(tokens: list[bytes]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    last = len(tokens) - 1
    return [decoder.decode(token, final=i == last) for i, token in enumerate(tokens)]
