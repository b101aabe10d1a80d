"""The heart of `Scheduler.schedule`: two numbers a request, and one budget."""


def schedule(requests: dict[str, tuple[int, int]], budget: int) -> dict[str, int]:
    num_tokens = {}
    for name, (computed, known) in requests.items():
        count = min(known - computed, budget)
        if count > 0:
            num_tokens[name] = count
            budget -= count
    return num_tokens
