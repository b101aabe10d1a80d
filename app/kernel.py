"""The kernel view: what one block of threads of a paged-attention rung did, from the emulator's tracer.

It needs the compiled extension. `make_kernel_page` gives one JSON value, in which an event is a short list; the browser
steps through it as it does through a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fast.kernel_trace import KernelTrace, WarpEvent

OPERATION = "paged_attention"
MAX_EVENTS = 6000  # of the block that is shown; counts are always of all
BANKS = 32  # of shared memory, 4 bytes wide
SECTOR_BYTES = 32
SEQS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 64
LENGTHS = range(1, 129)
BLOCK_SIZES = (8, 16, 32)
DTYPES = ("float32", "float16", "bfloat16")
COUNTED = (
    "global_instructions", "sectors", "fewest_sectors", "shared_instructions", "bank_conflicts", "barriers", "shuffles",
    "shared_bytes", "threads",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One decode step of two sequences, 4 query heads over 2 KV heads of 64. `length`: tokens of the first one."""

    length: int = 24
    block_size: int = 8
    dtype: str = "float32"

    def check(self) -> None:
        """Raises ValueError when it is none of those that the page offers."""
        if type(self.length) is not int or self.length not in LENGTHS:
            raise ValueError(
                f"The context must be {LENGTHS[0]} to {LENGTHS[-1]} tokens long, got {self.length!r}."
            )
        if self.block_size not in BLOCK_SIZES or self.dtype not in DTYPES:
            raise ValueError(f"There is no such kernel: block size {self.block_size!r}, {self.dtype!r}.")


def why_unavailable() -> tuple[str, str] | None:
    """None where kernels can be traced, else a sentence that says what is missing, in English and in Chinese."""
    try:
        from fast import kernels

        is_there = find_spec("fast._simt_trace") is not None and bool(kernels.ladder("simt").rungs)
    except ImportError:
        is_there = False
    if not is_there:
        return (
            "The kernel view needs the compiled extension: build it with `make`, or with "
            "`pip install --no-build-isolation -e .` in the repository, and start the app again.",
            "内核视图需要编译好的扩展：在仓库中用 `make` 或 "
            "`pip install --no-build-isolation -e .` 构建，然后重新启动应用。",
        )
    return None


def rungs() -> tuple[str, ...]:
    """From naive to fast; none where kernels cannot be traced."""
    if why_unavailable() is not None:
        return ()
    from fast import kernels

    return kernels.ladder("simt").rungs[OPERATION]


@lru_cache(maxsize=32)
def trace_rung(rung: str, problem: Problem) -> KernelTrace:
    """Run the rung under the emulator. Raises ValueError when it does not take the problem."""
    import torch

    from fast import kernels

    random = torch.Generator().manual_seed(0)
    dtype = getattr(torch, problem.dtype)
    lengths = [problem.length, max(1, problem.length // 2)]
    per_seq = [math.ceil(length / problem.block_size) for length in lengths]
    num_blocks = sum(per_seq) + 3
    order = (torch.randperm(num_blocks - 1, generator=random) + 1).tolist()  # block 0 is nobody's
    tables = torch.zeros(SEQS, max(per_seq), dtype=torch.int32)
    for seq, count in enumerate(per_seq):
        tables[seq, :count] = torch.tensor([order.pop() for _ in range(count)])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    query = normal(SEQS, HEADS, HEAD_DIM)  # [S, H, D]
    k_cache = normal(num_blocks, problem.block_size, KV_HEADS, HEAD_DIM)  # [N, B, Hkv, D]
    v_cache = normal(num_blocks, problem.block_size, KV_HEADS, HEAD_DIM)
    return kernels.trace_kernel(
        kernels.ladder("simt"), OPERATION, torch.empty_like(query), query, k_cache, v_cache, tables,
        torch.tensor(lengths, dtype=torch.int32), HEAD_DIM**-0.5, rung=rung,
    )  # fmt: skip


def make_kernel_page(rung: str, problem: Problem) -> dict[str, Any]:
    """The value of the kernel viewer.

    Args:
        rung: the one to step through; all are run, so that their counts can be compared.
        problem: what they compute.

    Raises:
        ValueError: the problem or the rung is none, or the rung does not take it.
    """
    problem.check()
    if rung not in rungs():
        raise ValueError(f"There is no rung {rung!r} of {OPERATION}.")
    trace = trace_rung(rung, problem)
    # Warps are independent between two barriers only: all of a phase before anything of the next.
    events = sorted(trace.events, key=lambda event: (event.launch, event.phase))[:MAX_EVENTS]
    arrays = [*trace.buffers, *trace.shared_arrays]
    index = {
        ("shared" if array in trace.shared_arrays else "global", array.name): i
        for i, array in enumerate(arrays)
    }
    return {
        "rung": rung,
        "dtype": problem.dtype,
        "head_dim": HEAD_DIM,
        "kv_heads": KV_HEADS,
        "block_size": problem.block_size,
        "lengths": [problem.length, max(1, problem.length // 2)],
        "num_events": len(trace.events),
        "arrays": [
            {"name": a.name, "dtype": a.dtype, "bytes": a.bytes, "shared": a in trace.shared_arrays}
            for a in arrays
        ],
        "launches": [
            {"grid": launch.grid, "block": launch.block, "shared_bytes": launch.shared_bytes}
            for launch in trace.launches
        ],
        "sites": [
            {
                "at": f"{site.file.rpartition('/')[2]}:{site.line}",
                "function": site.function,
                "name": site.name,
            }
            for site in trace.sites
        ],
        "cache": _cache(trace),
        "events": [encode_event(event, index) for event in events],
        "hot": _hot_sites(trace),
        "counts": {name: counts_of(name, problem) for name in rungs()},
    }


def counts_of(rung: str, problem: Problem) -> dict[str, int] | None:
    """What the rung cost over the whole grid, by `COUNTED`; None where it does not take the problem."""
    try:
        counts = trace_rung(rung, problem).counts
    except ValueError:
        return None
    return {name: getattr(counts, name) for name in COUNTED}


def encode_event(event: WarpEvent, index: dict[tuple[str, str], int]) -> list[Any]:
    """[launch, phase, warp, did, site, width, lanes, array, offsets, values, cost, least].

    `lanes` and `offsets` are [first, step, count] where they make an even row, otherwise {"all": [...]}. `array` is -1
    for what is no access. `cost` and `least` are sectors in global and wavefronts in shared memory.
    """
    arrays = {index[event.space, name] for name in event.arrays}
    cost = event.sectors if event.space == "global" else event.wavefronts
    return [
        event.launch, event.phase, event.warp, event.did, event.site, event.width, _row(event.lanes),
        min(arrays, default=-1), _row(event.offsets), [_round(value) for value in event.values], cost, least(event),
    ]  # fmt: skip


def least(event: WarpEvent) -> int:
    """The fewest sectors, or passes over the banks, that could move the bytes this event touches."""
    if not event.offsets:
        return 0
    touched = {
        (name, byte)
        for name, offset in zip(event.arrays, event.offsets, strict=True)
        for byte in range(offset, offset + event.width)
    }
    return math.ceil(len(touched) / (SECTOR_BYTES if event.space == "global" else 4 * BANKS))


def _row(numbers: Sequence[int]) -> list[int] | dict[str, list[int]]:
    if not numbers:
        return [0, 0, 0]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    if all(number == numbers[0] + i * step for i, number in enumerate(numbers)):
        return [numbers[0], step, len(numbers)]
    return {"all": list(numbers)}


def _round(numbers: Sequence[float | None]) -> list[float | None]:
    return [None if number is None else float(f"{number:.4g}") for number in numbers]


def _cache(trace: KernelTrace) -> dict[str, Any]:
    """Slots of the paged cache, and which token (sequence, position) lies in each that holds one."""
    tokens = {
        slot: token
        for event in trace.events
        for slot, token in zip(event.slots, event.tokens, strict=True)
        if token is not None
    }
    shape = next(array.shape for array in trace.buffers if array.name == "k_cache")
    return {"num_blocks": shape[0], "tokens": [[slot, *token] for slot, token in sorted(tokens.items())]}


def _hot_sites(trace: KernelTrace) -> list[dict[str, Any]]:
    """The instructions that cost most, over the whole grid."""
    rows: list[dict[str, Any]] = [
        {
            "site": site.site, "did": site.did, "space": site.space, "array": site.array, "width": site.width,
            "instructions": site.instructions,
            "cost": site.sectors if site.space == "global" else site.wavefronts,
            "least": site.fewest_sectors if site.space == "global" else site.fewest_wavefronts,
        }
        for site in trace.by_site
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["cost"])[:8]
