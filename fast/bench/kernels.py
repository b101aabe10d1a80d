"""`twinfer bench kernels`: each rung of the CUDA kernels against the one before.

Under the emulator (`--device simt`) the figures are counts of a trace, which no load on the machine changes. On a GPU
they are times and bytes a second, on the CPU the times of the kernels of `csrc/cpu`, which have no rungs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fast.bench.plots import bars
from fast.bench.results import Document, make_document, print_table, report

if TYPE_CHECKING:  # `twinfer bench` knows this benchmark without torch, too
    import torch

    from fast.bench.kernel_cases import Arguments, Case
    from fast.kernel_trace import KernelCounts

# Rows of the tables, in the order of KernelCounts.
COUNTS = (
    "global_instructions",
    "global_bytes",
    "sectors",
    "block_bytes",
    "shared_wavefronts",
    "bank_conflicts",
    "barriers",
    "shuffles",
    "tensor_core_operations",
    "shared_bytes",
)


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    parser.add_argument(
        "--device",
        choices=("simt", "cpu", "cuda"),
        default="simt",
        help="simt: counts of the emulator (the default); cuda, cpu: times",
    )
    parser.add_argument(
        "--operation", nargs="+", metavar="NAME", help="ladders, such as paged_attention (default: all)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of simt and cuda; float32 unless given, float16 for attention, whose best rungs take only 16 bits",
    )
    parser.add_argument(
        "--repeat", type=int, default=20, metavar="N", help="timed calls of a rung (default: 20)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {arguments.repeat}.")
    try:
        import torch

        from fast.bench.kernel_cases import CASES
    except ImportError as error:
        raise ValueError(f"The kernels cannot be loaded: {error}") from error
    for name in arguments.operation or ():
        if name not in CASES:
            raise ValueError(f"--operation {name} is unknown; there are {', '.join(CASES)}.")
    cases = [CASES[name] for name in arguments.operation or CASES]
    dtype = arguments.dtype and getattr(torch, arguments.dtype)
    if arguments.device == "simt":
        rows = [row for case in cases for row in count_rungs(case, dtype)]
    elif arguments.device == "cuda":
        rows = [row for case in cases for row in time_rungs(case, dtype, arguments.repeat)]
    else:
        rows = [row for case in cases for row in time_cpu(case, arguments.repeat)]
    document = make_document("kernels", device=arguments.device, rungs=rows)
    report(arguments, document, lambda: _print(document), lambda figure: _draw(document, figure))
    return 0


def count_rungs(case: Case, dtype: torch.dtype | None = None) -> Iterator[dict[str, Any]]:
    """The counts of each rung on one call, and the figure that it claims to improve.

    Rungs that do not take the type are left out.
    """
    from fast import kernels
    from fast.bench.kernel_cases import SMALL

    ladder, dtype = kernels.ladder("simt"), dtype or case.dtype
    for name, claim in zip(ladder.rungs[case.operation], ladder.claims[case.operation], strict=True):
        try:
            # No block has this index: counts are wanted, and no events.
            trace = kernels.trace_kernel(
                ladder, case.method, **case.make(SMALL, dtype), rung=name, block=(1 << 30, 0, 0)
            )
        except ValueError as error:
            if not _is_refusal(error):
                raise
            continue
        yield _row(case, name, dtype) | {"claim": claim} | _counts(trace.counts)


def _row(case: Case, rung: str, dtype: torch.dtype) -> dict[str, Any]:
    return {"operation": case.operation, "rung": rung, "dtype": str(dtype).removeprefix("torch.")}


def _counts(counts: KernelCounts) -> dict[str, int]:
    return {name: int(getattr(counts, name)) for name in COUNTS}


def _is_refusal(error: ValueError) -> bool:
    """A rung says so when the call is right and not for it."""
    return str(error).startswith("rung:") or "expected dtype" in str(error)


def time_rungs(case: Case, dtype: torch.dtype | None, repeat: int) -> Iterator[dict[str, Any]]:
    """Median time of each rung on the GPU, and the bytes that the call needs by that time."""
    from fast import kernels
    from fast.bench.kernel_cases import LARGE, on_gpu

    ladder, dtype = kernels.ladder("cuda"), dtype or case.dtype
    arguments = on_gpu(case.make(LARGE, dtype))
    method = getattr(ladder, case.method)
    for name in ladder.rungs[case.operation]:
        try:
            method(**arguments, rung=name)  # also what is slow but once
        except ValueError as error:
            if not _is_refusal(error):
                raise
            continue
        yield _row(case, name, dtype) | _timed(_gpu_times(method, arguments, name, repeat), arguments)


def _gpu_times(method: Callable[..., None], arguments: Arguments, rung: str, repeat: int) -> list[float]:
    """Seconds of each call, between two events on the stream."""
    import torch

    make: Any = torch.cuda.Event  # untyped
    events = [(make(enable_timing=True), make(enable_timing=True)) for _ in range(repeat)]
    for before, after in events:
        before.record()
        method(**arguments, rung=rung)
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in events]


def time_cpu(case: Case, repeat: int) -> Iterator[dict[str, Any]]:
    """Median time of the CPU's kernel for the same work, in float32; nothing where it has none."""
    import torch

    from fast import kernels
    from fast.bench.kernel_cases import LARGE

    if case.cpu is None:
        return
    arguments = case.make(LARGE, torch.float32)
    case.cpu(arguments)
    times = []
    for _ in range(repeat):
        start = perf_counter()
        case.cpu(arguments)
        times.append(perf_counter() - start)
    yield _row(case, f"cpu {kernels.isa()}", torch.float32) | _timed(times, arguments)


def _timed(times: list[float], arguments: Arguments) -> dict[str, float]:
    from fast.bench.kernel_cases import useful_bytes

    seconds = median(times)
    return {
        "median_us": seconds * 1e6,
        "fastest_us": min(times) * 1e6,
        "gb_per_s": useful_bytes(arguments) / seconds / 1e9,
    }


def _print(document: Document) -> None:
    if document["device"] != "simt":
        headings = ["rung", "type", "median us", "fastest us", "GB/s"]
        rows = [
            [f"{row['operation']} {row['rung']}", row["dtype"]]
            + [f"{row[name]:,.1f}" for name in ("median_us", "fastest_us", "gb_per_s")]
            for row in document["rungs"]
        ]
        notes = ["GB/s: the bytes that the call has to read and write once, by the median time."]
        print_table(f"kernels on {document['device']}", headings, rows, notes)
        return
    for operation in dict.fromkeys(row["operation"] for row in document["rungs"]):
        _print_counts([row for row in document["rungs"] if row["operation"] == operation])
    print(
        "A percentage: what a rung leaves of the figure that it is there for. Sectors are 32 bytes of global memory,\n"
        "block bytes those of a block of the first kernel. Instructions, shuffles and tensor core operations are\n"
        "counted once a warp, barriers once a block."
    )


def _print_counts(rungs: list[dict[str, Any]]) -> None:
    """Rungs side by side, so that a ladder is read from left to right."""
    headings = [rungs[0]["dtype"], *(row["rung"].replace("_", " ") for row in rungs)]
    share = {row["rung"]: _share(before, row) for before, row in improvements(rungs)}
    rows = [
        [name.replace("_", " ")]
        + [f"{row[name]:,}" + (f" {share[row['rung']]}" if name == row["claim"] else "") for row in rungs]
        for name in COUNTS
        if any(row[name] for row in rungs)
    ]
    print_table(rungs[0]["operation"], headings, rows)


def improvements(rungs: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The rung before and the rung, for each that claims something."""
    for before, row in pairwise(rungs):
        if before["operation"] == row["operation"] and row["claim"]:
            yield before, row


def _share(before: dict[str, Any], row: dict[str, Any]) -> str:
    return f"{row[row['claim']] / before[row['claim']]:.0%}"


def _draw(document: Document, figure: Any) -> None:
    """Of each rung the figure that it claims, as a share of what the rung before has; or its time."""
    figure.set_size_inches(11, 2 + 0.3 * len(document["rungs"]))
    if document["device"] != "simt":
        labels = [f"{row['operation']} {row['rung']}" for row in document["rungs"]]
        times = [row["median_us"] for row in document["rungs"]]
        bars(figure.subplots(), f"Kernels on {document['device']}", labels, times, "us")
        return
    pairs = list(improvements(document["rungs"]))
    labels = [f"{row['operation']} {row['rung']}: {row['claim'].replace('_', ' ')}" for _, row in pairs]
    shares = [100 * row[row["claim"]] / before[row["claim"]] for before, row in pairs]
    bars(figure.subplots(), "What each rung leaves of the rung before", labels, shares, "%")
