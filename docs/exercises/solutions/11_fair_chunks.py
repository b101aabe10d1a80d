"""`Plan.clamp_chunk`, and why `schedule` looks whether the request has company."""


def schedule(requests: dict[str, tuple[int, int]], budget: int, threshold: int) -> dict[str, int]:
    limit = threshold if threshold and len(requests) >= 2 else budget
    num_tokens = {}
    for name, (computed, known) in requests.items():
        count = min(known - computed, limit, budget)
        if count > 0:
            num_tokens[name] = count
            budget -= count
    return num_tokens
