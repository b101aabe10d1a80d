"""Why a batch is nearly free until the two meet, and why packed weights move that point to the left."""


def step_floor(
    weights: int, bytes_per_weight: float, kv_bytes: int, batch: int, bandwidth: float, peak: float
) -> float:
    num_bytes = weights * bytes_per_weight + batch * kv_bytes
    num_operations = 2 * weights * batch
    return max(num_bytes / bandwidth, num_operations / peak)


def balanced_batch(bytes_per_weight: float, bandwidth: float, peak: float) -> float:
    return bytes_per_weight * peak / (2 * bandwidth)
