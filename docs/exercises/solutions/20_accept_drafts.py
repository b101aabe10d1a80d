"""Coupled acceptance: a draft holds if it is what would have been drawn anyway, so nothing can change."""


def accepted(drafts: list[int], drawn: list[int]) -> list[int]:
    count = 0
    while count < len(drafts) and drafts[count] == drawn[count]:
        count += 1
    return drawn[: count + 1]


def wasted_slots(drafts: list[int], drawn: list[int]) -> int:
    return len(drafts) + 1 - len(accepted(drafts, drawn))
