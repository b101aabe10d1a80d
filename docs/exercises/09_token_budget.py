"""Share one step's token budget.

Continuous batching in one function. Every request has `computed` tokens and `known` tokens (prompt and output so far);
a step lets each catch up, in order, as far as the budget goes. Return how many tokens each request gets; requests that
get none are left out. There is no prefill and no decode in this function: find them in its results.
"""

HINTS = (
    "min(what it is behind, what is left of the budget).",
    "A decode is a request that is one token behind; a chunked prefill is one that the budget cut short.",
)


def schedule(requests: dict[str, tuple[int, int]], budget: int) -> dict[str, int]:
    """`requests`: id -> (computed, known), in scheduling order."""
    raise NotImplementedError
