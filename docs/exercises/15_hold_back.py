"""Stop strings in a stream.

Text arrives in pieces and is passed on as it comes. A request has stop strings, and what belongs to one must never have
been sent: if "END" stops it and "...E" has arrived, the E must be held back until it is clear what follows. Return the
pieces to send; at a stop string nothing more is sent, and what was held back at the end of the input is sent then.
"""

HINTS = (
    "Keep the text so far, and how much of it was sent.",
    "After each piece: is a stop string in the text? Cut there, send what is before it, and end.",
    "Otherwise hold back the longest end of the text that is the beginning of a stop string.",
)


def stream(pieces: list[str], stops: list[str]) -> list[str]:
    """Each piece that is sent is not empty."""
    raise NotImplementedError
