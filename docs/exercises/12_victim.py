"""Whom does preemption hit?

Blocks are short, so somebody must give his back. Under "fcfs" it is the running request that was admitted last; under
"priority" the one with the largest (priority, arrival), where a small number is a high priority. Then the victim goes
back to wait: under "fcfs" to the head of the queue, under "priority" to its place in the order. Return the victim, and
the queue afterwards. `running` is in order of admission.
"""

HINTS = (
    "fcfs: running[-1]. It arrived last of those that run, so nobody who waits came before it.",
    "priority: max() with a key, and sorted() with the same key.",
)


def preempt(running: list[str], waiting: list[str], policy: str, rank: dict[str, tuple[int, int]]):
    """`rank`: id -> (priority, arrival). Returns (victim, waiting queue with the victim in it)."""
    raise NotImplementedError
