"""Speculation without changing a token.

Some tokens were guessed; one forward pass has given what the model itself would draw behind each of them: `drawn[0]`
behind the known tokens, `drawn[j]` if the first j drafts are right. Return the tokens that hold: the drafts up to the
first wrong one, and in its place what the model has drawn. With k drafts a step gives 1 to k + 1 tokens.
"""

HINTS = (
    "drawn has one entry more than drafts.",
    "drawn[j] counts only if all drafts before it were right.",
)


def accepted(drafts: list[int], drawn: list[int]) -> list[int]:
    raise NotImplementedError


def wasted_slots(drafts: list[int], drawn: list[int]) -> int:
    """How many of the positions that the pass has computed hold K and V of tokens that are not in the sequence."""
    raise NotImplementedError
