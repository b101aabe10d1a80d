"""Guess from the sequence itself.

Text repeats itself. Take the last n tokens, look for their earliest occurrence before the end, and guess that what
followed there follows again. Try n = `longest` first, then shorter ones down to `shortest`. At most `k` tokens; none if
nothing is found.
"""

HINTS = (
    "The tail itself is not an occurrence: something must follow it.",
    "Fewer than k tokens may follow: take what there is.",
)


def propose(token_ids: list[int], shortest: int, longest: int, k: int) -> list[int]:
    raise NotImplementedError
