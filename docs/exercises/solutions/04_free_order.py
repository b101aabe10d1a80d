"""Evict what nobody can find first, and of the rest what was used longest ago, tails before shared beginnings."""


def free(queue: list[int], table: list[int], hashed: set[int]) -> list[int]:
    backwards = table[::-1]
    unfindable = [block for block in backwards if block not in hashed]
    findable = [block for block in backwards if block in hashed]
    return unfindable + queue + findable
