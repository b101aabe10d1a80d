"""What is sent cannot be taken back: so hold back whatever a stop string may begin with."""


def _held_back(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    longest = max(map(len, stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def stream(pieces: list[str], stops: list[str]) -> list[str]:
    text, num_sent, sent = "", 0, []

    def send(end: int) -> None:
        nonlocal num_sent
        if end > num_sent:
            sent.append(text[num_sent:end])
            num_sent = end

    for piece in pieces:
        text += piece
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            send(min(found))
            return sent
        send(len(text) - _held_back(text, stops))
    send(len(text))
    return sent
