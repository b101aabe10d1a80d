"""What a CUDA kernel did, access by access: `kernels.trace_kernel` runs one under the emulator and returns a record.

Counts are of the whole grid; events are what the warps of one block did, in order. `KernelTrace.to_json` is the
document that the app draws; docs/kernels.md describes it.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fast.ladder import Ladder

FORMAT, VERSION = "twinfer-kernel-trace", 1
SECTOR_BYTES = 32  # what global memory moves at least


@dataclass(frozen=True)
class NamedArray:
    """An argument of the kernel, memory between two kernels, or a shared array. `shape` is () where it has none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class TracedLaunch:
    """One kernel launch of the call. `shared_bytes` is what a block has, static and dynamic."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int


@dataclass(frozen=True)
class TraceSite:
    """A place in the source that did something.

    Attributes:
        file, line, function: the innermost line that is no helper of `numeric.cuh`.
        name: of the primitive (`__syncthreads`, `__shfl_xor_sync`) or of the watched value; "" for loads and stores.
        frames: (file, line, function) from the innermost inlined function out to the kernel.
    """

    file: str
    line: int
    function: str
    name: str
    frames: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class SiteCounts:
    """All accesses of one instruction to one array. `width` is bytes a lane; instructions are those of warps."""

    launch: int
    site: int
    did: str
    space: str
    array: str
    width: int
    instructions: int
    lanes: int
    bytes: int
    sectors: int
    fewest_sectors: int
    wavefronts: int
    fewest_wavefronts: int


@dataclass(frozen=True)
class KernelCounts:
    """What a call cost, over the whole grid.

    Attributes:
        blocks, threads: launched, of all launches together.
        shared_bytes: of a block, the most of any launch.
        barriers: `__syncthreads`, each counted once a block.
        warp_operations: shuffles, votes and `mma.sync` by name, each counted once a warp.
        global_instructions, shared_instructions: loads and stores of warps.
        global_bytes: asked for by the lanes of warps.
        sectors: of 32 bytes, that hold these bytes; each sector counts once an instruction.
        fewest_sectors: that could hold the same bytes; sectors above it are lost to poor coalescing.
        block_bytes: the bytes of the sectors, a block of the first launch: what one multiprocessor must fetch itself.
        shared_wavefronts: passes over the 32 banks. Those above one (two for 8-byte, four for 16-byte accesses of a
            whole warp) are `bank_conflicts`.
        unnamed: accesses to global memory that belongs to no argument; 0, or a kernel reads what it should not.
    """

    blocks: int
    threads: int
    shared_bytes: int
    barriers: int
    warp_operations: Mapping[str, int]
    global_instructions: int
    global_bytes: int
    sectors: int
    fewest_sectors: int
    block_bytes: int
    shared_instructions: int
    shared_wavefronts: int
    bank_conflicts: int
    unnamed: int

    @property
    def shuffles(self) -> int:
        """Exchanges of values between the lanes of a warp."""
        return sum(count for name, count in self.warp_operations.items() if name.startswith("__shfl"))

    @property
    def tensor_core_operations(self) -> int:
        return self.warp_operations.get("mma.sync", 0)


@dataclass(frozen=True)
class WarpEvent:
    """What one warp of the traced block did at one place.

    Attributes:
        phase: barriers of the block that lie before it. Warps are independent of each other within a phase.
        did: "read", "write", "atomic", "barrier", "warp" (an operation such as a shuffle) or "watch".
        space: "global", "shared" or "".
        lanes: that took part, ascending. The sequences below have one entry for each.
        arrays, offsets: which array, and how many bytes into it; empty for what is no access.
        values: numbers read or written in shared memory, given to a shuffle, or watched; None where not finite.
        slots, heads, dims, tokens: of `k_cache` and `v_cache`: physical slot (block * B + offset), KV head, first
            dimension, and (sequence, position) of the token that lies there, or None if no token does.
    """

    launch: int
    phase: int
    warp: int
    did: str
    space: str
    site: int
    width: int
    sectors: int
    wavefronts: int
    lanes: tuple[int, ...]
    arrays: tuple[str, ...] = ()
    offsets: tuple[int, ...] = ()
    values: tuple[tuple[float | None, ...], ...] = ()
    slots: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()
    tokens: tuple[tuple[int, int] | None, ...] = ()


@dataclass(frozen=True)
class KernelTrace:
    """One traced call. `block` is the one whose events are kept, in each launch that has it."""

    operation: str
    rung: str
    seed: int
    architecture: str
    block: tuple[int, int, int]
    scalars: Mapping[str, float]
    buffers: tuple[NamedArray, ...]
    shared_arrays: tuple[NamedArray, ...]
    launches: tuple[TracedLaunch, ...]
    counts: KernelCounts
    by_site: tuple[SiteCounts, ...]
    events: tuple[WarpEvent, ...]
    _raw_sites: tuple[tuple[int, str, int, str], ...]
    _binary: str

    @cached_property
    def sites(self) -> tuple[TraceSite, ...]:
        """Where the accesses stand in the source; `addr2line` of binutils looks that up.

        Raises:
            RuntimeError: there is no addr2line.
        """
        return _look_up(self._raw_sites, self._binary)

    def to_dict(self) -> dict[str, Any]:
        """The document of docs/kernels.md as plain Python values."""
        document = {"format": FORMAT, "version": VERSION}
        for name in ("operation", "rung", "seed", "architecture", "block", "scalars"):
            document[name] = getattr(self, name)
        for name in ("buffers", "shared_arrays", "launches", "sites", "by_site"):
            document[name] = [asdict(each) for each in getattr(self, name)]
        document["counts"] = asdict(self.counts)
        document["events"] = [
            {key: value for key, value in vars(event).items() if value != ()} for event in self.events
        ]
        return document

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)


def record(
    module: ModuleType,
    ladder: Ladder,
    operation: str,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    block: tuple[int, int, int],
) -> KernelTrace:
    """Runs `ladder.operation(*arguments, **named)` on `module`, which is `fast._simt_trace`.

    Raises:
        ValueError: no such operation, or as the operation does.
        RuntimeError: as the operation does.
    """
    traced = replace(ladder, module=module, threads=1)
    method = getattr(traced, operation, None)
    if operation.startswith("_") or not inspect.ismethod(method):
        raise ValueError(f"operation: expected a method of Ladder, got {operation!r}.")
    bound = inspect.signature(method).bind(*arguments, **named)
    bound.apply_defaults()
    tensors = {name: value for name, value in bound.arguments.items() if isinstance(value, torch.Tensor)}
    recording = module.Recording(
        [(name, tensor.data_ptr(), _extent(tensor)) for name, tensor in tensors.items()], block
    )
    recording.begin()
    try:
        method(*bound.args, **bound.kwargs)
    finally:
        recording.end()
    scalars = {name: value for name, value in bound.arguments.items() if isinstance(value, int | float)}
    buffers = [_named(name, size, dtype, tensors) for name, size, dtype in recording.buffers()]
    shared = [_named(name, size, dtype, {}) for name, size, dtype in recording.shared_arrays()]
    by_site = tuple(
        SiteCounts(launch, site, did, space, (shared if space == "shared" else buffers)[array].name, *rest)
        for launch, site, did, space, array, *rest in recording.counts()
    )
    raw_sites = tuple(recording.sites())
    return KernelTrace(
        operation,
        str(bound.arguments.get("rung", "")),
        ladder.seed,
        ladder.architecture,
        block,
        scalars,
        tuple(buffers),
        tuple(shared),
        tuple(TracedLaunch(grid, threads, size) for grid, threads, size, *_ in recording.launches()),
        _total(recording.launches(), by_site),
        by_site,
        tuple(_events(recording.events(), buffers, shared, _Cache.of(tensors))),
        raw_sites,
        str(module.__file__),
    )


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last, gaps between rows included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def _named(name: str, size: int, dtype: str, tensors: Mapping[str, torch.Tensor]) -> NamedArray:
    if name not in tensors:
        return NamedArray(name, dtype, (), size)
    tensor = tensors[name]
    return NamedArray(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size)


def _total(launches: Sequence[Any], by_site: Sequence[SiteCounts]) -> KernelCounts:
    def total(name: str, space: str) -> int:
        return sum(getattr(site, name) for site in by_site if site.space == space)

    operations: dict[str, int] = {}
    for *_, by_name, _ in launches:
        for name, count in by_name.items():
            operations[name] = operations.get(name, 0) + count
    blocks = [math.prod(grid) for grid, *_ in launches]
    first = sum(site.sectors for site in by_site if site.launch == 0)
    return KernelCounts(
        blocks=sum(blocks),
        threads=sum(count * math.prod(launch[1]) for count, launch in zip(blocks, launches, strict=True)),
        shared_bytes=max((launch[2] for launch in launches), default=0),
        barriers=sum(launch[3] for launch in launches),
        warp_operations=operations,
        global_instructions=total("instructions", "global"),
        global_bytes=total("bytes", "global"),
        sectors=total("sectors", "global"),
        fewest_sectors=total("fewest_sectors", "global"),
        block_bytes=SECTOR_BYTES * first // blocks[0] if blocks else 0,
        shared_instructions=total("instructions", "shared"),
        shared_wavefronts=total("wavefronts", "shared"),
        bank_conflicts=total("wavefronts", "shared") - total("fewest_wavefronts", "shared"),
        unnamed=sum(launch[5] for launch in launches),
    )


@dataclass(frozen=True)
class _Cache:
    """Which token lies in which slot of the paged cache [N, B, Hkv, D]."""

    shape: tuple[int, ...]
    element_size: int
    tokens: Mapping[int, tuple[int, int]]  # slot -> (sequence, position)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> _Cache | None:
        if "k_cache" not in tensors:
            return None
        cache, tokens = tensors["k_cache"], {}
        block_size = cache.shape[1]
        if "block_tables" in tensors:
            tables = tensors["block_tables"].tolist()
            for s, length in reversed(list(enumerate(tensors["seq_lens"].tolist()))):
                for p in range(length):
                    tokens[tables[s][p // block_size] * block_size + p % block_size] = (s, p)
        elif "slot_mapping" in tensors:
            tokens = {slot: (0, t) for t, slot in enumerate(tensors["slot_mapping"].tolist())}
        return cls(tuple(cache.shape), cache.element_size(), tokens)

    def locate(self, event: WarpEvent) -> WarpEvent:
        """The event with what its offsets mean. A block that sequences share is taken for the first one's."""
        _, _, num_heads, head_dim = self.shape
        elements = [offset // self.element_size for offset in event.offsets]
        slots = tuple(element // (num_heads * head_dim) for element in elements)
        return replace(
            event,
            slots=slots,
            heads=tuple(element // head_dim % num_heads for element in elements),
            dims=tuple(element % head_dim for element in elements),
            tokens=tuple(self.tokens.get(slot) for slot in slots),
        )


def _events(
    raw: Sequence[Any], buffers: Sequence[NamedArray], shared: Sequence[NamedArray], cache: _Cache | None
) -> list[WarpEvent]:
    events = []
    for launch, phase, warp, did, space, site, width, sectors, wavefronts, dtype, lanes in raw:
        arrays = shared if space == "shared" else buffers
        values = tuple(_numbers(value, dtype, space) for *_, value in lanes)
        event = WarpEvent(
            launch,
            phase,
            warp,
            did,
            space,
            site,
            width,
            sectors,
            wavefronts,
            tuple(lane for lane, *_ in lanes),
            tuple(arrays[array].name for _, array, *_ in lanes) if space else (),
            tuple(offset for _, _, offset, _ in lanes) if space else (),
            values if any(values) else (),
        )
        if cache is not None and space == "global" and set(event.arrays) <= {"k_cache", "v_cache"}:
            event = cache.locate(event)
        events.append(event)
    return events


_NUMPY = {"float32": "f4", "float16": "f2", "int32": "i4", "int64": "i8", "bfloat16": "u2"}


def _numbers(value: bytes, dtype: str, space: str) -> tuple[float | None, ...]:
    """The numbers in what an access moved; a register holds one, in the lower bits of its word."""
    if not value or not dtype:
        return ()
    kind = np.dtype(_NUMPY[dtype])
    if not space:
        value = value[: kind.itemsize]
    numbers = np.frombuffer(value[: len(value) // kind.itemsize * kind.itemsize], kind)
    if dtype == "bfloat16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return tuple(number if math.isfinite(number) else None for number in numbers.tolist())


def _look_up(sites: Sequence[tuple[int, str, int, str]], binary: str) -> tuple[TraceSite, ...]:
    program = shutil.which("addr2line")
    if program is None:
        raise RuntimeError("The source lines of a trace need addr2line: install binutils.")
    offsets = [f"{offset:#x}" for offset, *_ in sites if offset >= 0]
    result = subprocess.run(
        [program, "-e", binary, "-a", "-i", "-f", "-C", *offsets], check=True, capture_output=True, text=True
    )
    found = iter(re.split(r"^0x[0-9a-f]+\n", result.stdout, flags=re.MULTILINE)[1:])
    return tuple(
        _site_of_frames(_frames(next(found)))
        if offset >= 0
        else TraceSite(file, line, "", name, ((file, line, ""),))
        for offset, file, line, name in sites
    )


def _frames(lines: str) -> tuple[tuple[str, int, str], ...]:
    """addr2line prints a function, then its file:line, from the innermost frame out."""
    texts = lines.splitlines()
    frames = []
    for function, place in zip(texts[::2], texts[1::2], strict=True):
        file, _, line = place.partition(" ")[0].rpartition(":")
        start = max(file.rfind("csrc/"), 0)
        frames.append((file[start:], int(line) if line.isdigit() else 0, _short_name(function)))
    return tuple(frames)


def _short_name(function: str) -> str:
    """`void twinfer::device::f<float, 64>(A)` and `_ZN7twinfer6device1fIfLi64EEEvA` -> `f`."""
    if function.startswith("_ZN"):  # too new for the installed binutils
        names, rest = [""], function[3:]
        while length := re.match(r"\d+", rest):
            end = length.end() + int(length[0])
            names.append(rest[length.end() : end])
            rest = rest[end:]
        return names[-1]
    before = None
    while before != function:
        before, function = function, re.sub(r"<[^<>]*>", "", function)
    return re.sub(r"^twinfer::(device|simt)::", "", function.partition("(")[0].rpartition(" ")[2])


def _site_of_frames(frames: tuple[tuple[str, int, str], ...]) -> TraceSite:
    own = [frame for frame in frames if not frame[0].endswith("numeric.cuh")] or list(frames)
    return TraceSite(*own[0], "", frames)
