"""Nobody overtakes: the victim comes back before everybody who arrived after it."""


def preempt(running: list[str], waiting: list[str], policy: str, rank: dict[str, tuple[int, int]]):
    if policy == "fcfs":
        victim = running[-1]
        return victim, [victim, *waiting]
    victim = max(running, key=lambda name: rank[name])
    return victim, sorted([*waiting, victim], key=lambda name: rank[name])
