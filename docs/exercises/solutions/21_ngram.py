"""Prompt lookup: no second model, and right whenever the text quotes itself."""


def propose(token_ids: list[int], shortest: int, longest: int, k: int) -> list[int]:
    for n in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        tail = token_ids[-n:]
        for start in range(len(token_ids) - n):
            if token_ids[start : start + n] == tail:
                return token_ids[start + n : start + n + k]
    return []
