"""Make chunked prefill fair.

A prompt of 10,000 tokens takes the whole budget of many steps, and every short request behind it waits. vLLM's answer
is `long_prefill_token_threshold`: no request gets more than so many tokens in a step. But a request that is alone gains
nothing from short chunks. Extend the function of exercise 9 by a threshold (0: none) that counts only when there are at
least two requests.
"""

HINTS = (
    "One more argument of min().",
    "len(requests) decides once, before the loop.",
)


def schedule(requests: dict[str, tuple[int, int]], budget: int, threshold: int) -> dict[str, int]:
    """`requests`: id -> (computed, known), in scheduling order."""
    raise NotImplementedError
