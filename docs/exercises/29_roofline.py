"""How fast can it be at all?

A step reads every weight once, whatever the batch, and the K and V of every sequence; and it computes two operations a
weight for every token. Whichever takes longer is the floor of its time. Write the floor of one decode step, and from
which batch on the step is limited by arithmetic, if K and V are left out.
"""

HINTS = (
    "max(bytes / bandwidth, operations / peak).",
    "Equal times: weight_bytes / bandwidth = batch * 2 * weights / peak.",
)


def step_floor(
    weights: int, bytes_per_weight: float, kv_bytes: int, batch: int, bandwidth: float, peak: float
) -> float:
    """Seconds. `kv_bytes`: read for each sequence; `bandwidth`: bytes/s; `peak`: operations/s."""
    raise NotImplementedError


def balanced_batch(bytes_per_weight: float, bandwidth: float, peak: float) -> float:
    raise NotImplementedError
