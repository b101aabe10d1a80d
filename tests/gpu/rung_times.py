"""Times every rung of the memory-bound kernels on a GPU: `python -m tests.gpu.rung_times --save PREFIX`.

Each rung's table line has its time, and the bytes that must cross memory once at the least over that time: against the
bandwidth of a device copy, and against what torch takes for the same result. Writes PREFIX.json and PREFIX.md.
A rung whose result is not torch's is an error: a wrong kernel has no time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

from fast import kernels
from fast.ladder import Ladder

# Of max(1, largest number): twice those of tests/kernels, as here torch rounds too.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
REPEATS = 20
LONGEST = 400.0  # milliseconds for the repeats of one rung: naive ones take a second each


@dataclass(frozen=True)
class Sizes:
    """S sequences, of `context` tokens, chunks of `chunk`; `rows` of `width` numbers for what is not attention."""

    seqs: int
    context: int
    chunk: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    rows: int
    width: int


# Every tensor is larger than the L2 cache of an H100 or H200 (50 MB), so that each launch reads memory.
ON_GPU = Sizes(64, 2048, 64, 32, 8, 128, 16, 16384, 4096)


@dataclass(frozen=True)
class Work:
    """One operation on one set of tensors.

    Attributes:
        title: with the sizes.
        operation: its name in `Ladder.rungs`.
        bytes: that are read and written if nothing is read twice.
        launch: calls a rung.
        result: what the launch wrote.
        rival: computes the same with torch, and returns it in the shape of `result`.
    """

    title: str
    operation: str
    bytes: int
    launch: Callable[[Ladder, str], None]
    result: Callable[[], torch.Tensor]
    rival: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Time:
    title: str
    rung: str  # or what it is compared with
    milliseconds: float
    gigabytes_per_second: float


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def elementwise(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Work]:
    R, C = sizes.rows, sizes.width
    x = torch.randn(R, C, device=device).to(dtype)  # [R, C]
    out, weight = torch.empty_like(x), torch.ones(C, device=device, dtype=dtype)
    shape = f"[{R}, {C}]"
    yield Work(
        f"rms_norm {shape}", "rms_norm", nbytes(x, out),
        lambda ladder, rung: ladder.rms_norm(out, x, weight, 1e-5, rung),
        lambda: out, lambda: functional.rms_norm(x, (C,), weight, 1e-5),
    )  # fmt: skip
    yield Work(
        f"softmax {shape}", "softmax", nbytes(x, out),
        lambda ladder, rung: ladder.softmax(out, x, rung),
        lambda: out, lambda: x.softmax(-1),
    )  # fmt: skip
    half = torch.empty(R, C // 2, device=device, dtype=dtype)  # [R, C / 2]
    yield Work(
        f"silu_mul {shape}", "silu_mul", nbytes(x, half),
        lambda ladder, rung: ladder.silu_and_mul(half, x, rung),
        lambda: half, lambda: functional.silu(x[:, : C // 2]) * x[:, C // 2 :],
    )  # fmt: skip


@dataclass(frozen=True)
class Cache:
    """K and V of all sequences in scattered blocks, and the same as torch wants them."""

    k_cache: torch.Tensor  # [N, B, Hkv, D]
    v_cache: torch.Tensor  # [N, B, Hkv, D]
    block_tables: torch.Tensor  # [S, context / B]
    seq_lens: torch.Tensor  # [S]

    def gathered(self, cache: torch.Tensor) -> torch.Tensor:
        """The rows of every sequence in order: [S, Hkv, context, D]."""
        return cache[self.block_tables.long()].flatten(1, 2).transpose(1, 2).contiguous()


def scattered_cache(sizes: Sizes, dtype: torch.dtype, device: str) -> Cache:
    per_seq = sizes.context // sizes.block_size
    N = sizes.seqs * per_seq
    shape = (N, sizes.block_size, sizes.kv_heads, sizes.head_dim)
    k_cache, v_cache = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    tables = torch.randperm(N, device=device).to(torch.int32).view(sizes.seqs, per_seq)
    lens = torch.full((sizes.seqs,), sizes.context, device=device, dtype=torch.int32)
    return Cache(k_cache, v_cache, tables, lens)


def attention(sizes: Sizes, dtype: torch.dtype, device: str) -> Iterator[Work]:
    """The rival is given K and V gathered: it need not follow a block table."""
    cache = scattered_cache(sizes, dtype, device)
    k, v = cache.gathered(cache.k_cache), cache.gathered(cache.v_cache)  # [S, Hkv, context, D]
    S, H, D, scale = sizes.seqs, sizes.heads, sizes.head_dim, sizes.head_dim**-0.5
    what = f"{S} sequences of {sizes.context}, {H}/{sizes.kv_heads} heads of {D}"
    query = torch.randn(S, H, D, device=device).to(dtype)  # [S, H, D]
    out = torch.empty_like(query)
    caches = (cache.k_cache, cache.v_cache, cache.block_tables)
    yield Work(
        f"paged_attention, {what}", "paged_attention", nbytes(query, out, k, v, cache.block_tables),
        lambda ladder, rung: ladder.paged_attention(out, query, *caches, cache.seq_lens, scale, 0, rung),
        lambda: out,
        lambda: functional.scaled_dot_product_attention(query[:, :, None], k, v, scale=scale, enable_gqa=True)[:, :, 0],
    )  # fmt: skip
    L = sizes.chunk
    chunks = torch.randn(S * L, H, D, device=device).to(dtype)  # [T, H, D]
    chunks_out = torch.empty_like(chunks)
    starts = torch.arange(0, S * L + 1, L, device=device, dtype=torch.int32)  # [S + 1]
    seen = torch.ones(L, sizes.context, dtype=torch.bool, device=device).tril(sizes.context - L)
    yield Work(
        f"prefill_attention, the last {L} of {what}", "prefill_attention",
        nbytes(chunks, chunks_out, k, v, cache.block_tables),
        lambda ladder, rung: ladder.prefill_attention(
            chunks_out, chunks, *caches, starts, cache.seq_lens, scale, 0, rung
        ),
        lambda: chunks_out,
        lambda: functional.scaled_dot_product_attention(
            chunks.view(S, L, H, D).transpose(1, 2), k, v, attn_mask=seen, scale=scale, enable_gqa=True
        ).transpose(1, 2).reshape(S * L, H, D),
    )  # fmt: skip


def milliseconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of one call, after one to warm up: `repeats` calls, fewer where they would take too long."""
    one = on_gpu if device == "cuda" else clocked
    first = one(call)
    return statistics.median(one(call) for _ in range(max(1, min(repeats, int(LONGEST / first)))))


def on_gpu(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()  # type: ignore[no-untyped-call]
    call()
    end.record()  # type: ignore[no-untyped-call]
    end.synchronize()  # type: ignore[no-untyped-call]
    return float(start.elapsed_time(end))  # type: ignore[no-untyped-call]


def clocked(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def check(work: Work, rung: str, expected: torch.Tensor) -> None:
    """Raises ValueError unless the launch wrote what torch computes."""
    got, wanted = work.result().float(), expected.float()
    most = TOLERANCES[expected.dtype] * max(1.0, wanted.abs().max().item())
    error = (got - wanted).abs().max().item()
    if not error <= most:
        raise ValueError(
            f"{work.title}, {rung}: differs from torch by {error:.2g}, at most {most:.2g} is allowed."
        )


def times_of(work: Work, ladder: Ladder, device: str, repeats: int) -> list[Time]:
    """One line for torch and one for every rung that takes the call. Raises ValueError for a wrong result."""

    def line(name: str, call: Callable[[], object]) -> Time:
        ms = milliseconds(call, device, repeats)
        return Time(work.title, name, ms, work.bytes / ms / 1e6)

    expected = work.rival()
    lines = [line("torch", work.rival)]
    for rung in ladder.rungs[work.operation]:
        work.result().fill_(float("nan"))
        try:
            work.launch(ladder, rung)
        except ValueError:
            continue  # a rung for other types or shapes
        check(work, rung, expected)
        lines.append(line(rung, lambda rung=rung: work.launch(ladder, rung)))  # type: ignore[misc]
    return lines


def copy_time(sizes: Sizes, dtype: torch.dtype, device: str, repeats: int) -> Time:
    """A device copy: each byte is read once and written once."""
    source = torch.zeros(sizes.rows, sizes.width, device=device, dtype=dtype)
    target = torch.empty_like(source)
    ms = milliseconds(lambda: target.copy_(source), device, repeats)
    return Time("device copy", "torch", ms, nbytes(source, target) / ms / 1e6)


def measure(
    ladder: Ladder, sizes: Sizes, dtype: torch.dtype, device: str, repeats: int = REPEATS
) -> list[Time]:
    """All lines of one type; the first is the device copy."""
    lines = [copy_time(sizes, dtype, device, repeats)]
    for works in (elementwise, attention):
        for work in works(sizes, dtype, device):
            lines += times_of(work, ladder, device, repeats)
    return lines


def markdown(dtype: torch.dtype, lines: list[Time]) -> str:
    copy = lines[0].gigabytes_per_second
    rows = [
        f"| {line.title} | {line.rung} | {line.milliseconds:.3f} | {line.gigabytes_per_second:.0f} |"
        f" {line.gigabytes_per_second / copy:.0%} |"
        for line in lines
    ]
    head = ["| operation | rung | ms | GB/s | of a copy |", "|---|---|---:|---:|---:|"]
    return "\n".join([f"## Times in {str(dtype).removeprefix('torch.')}", "", *head, *rows, ""])


def main(prefix: Path) -> int:
    ladder, pages, saved = kernels.ladder("cuda"), [], {}
    for dtype in (torch.bfloat16, torch.float32):
        lines = measure(ladder, ON_GPU, dtype, "cuda")
        pages.append(markdown(dtype, lines))
        saved[str(dtype)] = [asdict(line) for line in lines]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_suffix(".md").write_text("\n".join(pages), encoding="utf-8")
    prefix.with_suffix(".json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    print("\n".join(pages))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save", type=Path, required=True, metavar="PREFIX", help="writes PREFIX.json and PREFIX.md"
    )
    sys.exit(main(parser.parse_args().save))
