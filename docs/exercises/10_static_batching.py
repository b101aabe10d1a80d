"""How much does a static batch waste?

Each of the `lengths` is the number of tokens a request generates, one a step. A static batch of `slots` requests runs
until its longest is done, then the next batch starts. With continuous batching the next request starts in the step
after a slot has become free. Return how many steps all requests take, in order of arrival, in both ways.
"""

HINTS = (
    "Static: the sum over batches of the longest in each.",
    "Continuous: keep for each slot the step in which it becomes free; the next request takes the earliest.",
)


def static_steps(lengths: list[int], slots: int) -> int:
    raise NotImplementedError


def continuous_steps(lengths: list[int], slots: int) -> int:
    raise NotImplementedError
