"""The C++ kernels of `csrc/cpu` on torch tensors. The only module that imports the compiled extensions.

The CUDA kernels of `csrc/kernels`, rung by rung, are behind `ladder`. Inside `using(on_device(...))` the functions
here are those of `DeviceKernels` instead: a model calls `kernels.rms_norm` and need not know where it runs.

Shapes: T tokens, S sequences, H query heads, Hkv KV heads, D head dim, B block size, N blocks, C hidden size,
F ffn size, V vocabulary, R logits rows. Data is float32 on the CPU. A tensor described as "rows" may have any
stride between its outermost entries (a slice of a fused projection); everything else must be contiguous.

Every function checks dtype, shape, device, strides and the range of every index in C++ before it writes
anything, and raises ValueError with the argument's name, what was expected and what was given. Results are
the same bits for a row alone, in any batch and with any number of threads; only the instruction set (see
`isa`) may change the last bits.
"""

from __future__ import annotations

import functools
import importlib
import math
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fast.cores import available_cores
from fast.device_kernels import DeviceKernels
from fast.kernel_trace import KernelTrace, record
from fast.ladder import Ladder

try:
    from fast import _cpu, _simt
except ImportError as error:
    raise ImportError(
        f"The kernels of the fast tier cannot be loaded ({error}): build them with `make`, or with "
        "`pip install --no-build-isolation -e .` in the repository."
    ) from error


def _cuda_module() -> ModuleType | None:
    """`fast._cuda`, where it was built."""
    try:
        return importlib.import_module("fast._cuda")
    except ImportError:
        return None


_cuda = _cuda_module()

# The kernels run on as many threads as torch is set to. Torch knows the cores, but not the limits of a container.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(available_cores())

_ISA = _cpu.isa()  # here, so that a wrong TWINFER_ISA is reported before any request runs


def isa() -> str:
    """The instruction set in use: `baseline`, `avx2` or `avx512`, the widest this CPU has.

    The environment variable TWINFER_ISA, read once per process, forces one; importing this module raises
    ValueError if it names an unknown one or one that this CPU lacks.
    """
    return _ISA


def why_no_gpu() -> str | None:
    """None when the device "cuda" can be used here, else one sentence that says what is missing."""
    if _cuda is None:
        return "The kernels for GPUs are not built: install nvcc and build with `TWINFER_CUDA=ON make clean setup`."
    if not torch.cuda.is_available():
        return "Torch sees no GPU: it needs an NVIDIA GPU, its driver, and a torch that was built for CUDA."
    try:
        _cuda.probe()
    except RuntimeError as error:
        return f"The kernels do not run on this GPU ({error}): they are built for compute capability 8.0 and above."
    return None


def ladder(device: str, seed: int = 0, threads: int = 1, architecture: str = "sm_80") -> Ladder:
    """The CUDA kernels for a device.

    Args:
        device: "cuda", on tensors of the GPU; or "simt", which runs them on the CPU, one fiber a CUDA thread, on CPU
            tensors.
        seed, threads, architecture: of the emulator, see `Ladder`.

    Raises:
        ValueError: another device, one that cannot be used here, or an option out of range.
    """
    if device == "simt":
        return Ladder(_simt, seed, threads, architecture)
    if device != "cuda":
        raise ValueError(
            f"device: expected 'cuda', or 'simt' for the CUDA kernels under the emulator, got {device!r}."
        )
    reason = why_no_gpu()
    if reason is not None:
        raise ValueError(f"device 'cuda' cannot be used here. {reason}")
    assert _cuda is not None  # or there would be a reason
    return Ladder(_cuda)


def on_device(device: str, dtype: torch.dtype = torch.float32) -> DeviceKernels | None:
    """What `using` takes to run a model on a device: None for "cpu".

    Args:
        device: "cpu", "cuda", or "simt": the CUDA kernels under the emulator.
        dtype: of weights, activations and the KV cache. The CPU's kernels compute in float32 alone.

    Raises:
        ValueError: another device, one that cannot be used here, or a dtype that it does not compute in.
    """
    if device == "cpu":
        if dtype != torch.float32:
            raise ValueError(f"The CPU computes in float32 alone: leave dtype at float32, got {dtype}.")
        return None
    memory = torch.device("cuda" if device == "cuda" else "cpu")
    return DeviceKernels(ladder(device, threads=torch.get_num_threads()), memory, dtype, _unpacked)


# Like `torch.inference_mode`, it belongs to the thread that runs the model: two engines on two devices may run at once.
_DEVICE: ContextVar[DeviceKernels | None] = ContextVar("twinfer_device", default=None)


@contextmanager
def using(device: DeviceKernels | None) -> Iterator[None]:
    """Inside, the functions of this module run on `device`; None is the CPU."""
    token = _DEVICE.set(device)
    try:
        yield
    finally:
        _DEVICE.reset(token)


class _PlanMemory:
    """Memory of a plan's tensors. It is free again when the last tensor on it is gone, as it would be without a plan.

    So the plan of a model works in the few buffers that one layer needs, which stay in the cache, for all its layers.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)  # of each number of floats
        self._blocks: list[np.ndarray] = []  # all: a plan knows addresses alone
        self._kept: list[object] = []  # weights, caches and inputs, for the same reason

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        free = self._free[math.prod(shape)]
        if not free:
            # Pages that come into being when first written: small steps do not pay for the largest one.
            self._blocks.append(np.empty(math.prod(shape), np.float32))
            free.append(self._blocks[-1])
        block = free.pop()
        held = block.reshape(shape)  # by every tensor that shares this memory
        weakref.finalize(held, free.append, block).atexit = False
        return torch.from_numpy(held)

    def keep(self, args: Iterable[object]) -> None:
        """Holds a call's arguments, but for those in this memory, which have to become free."""
        self._kept.extend(each for each in args if not (isinstance(each, torch.Tensor) and self._owns(each)))

    def _owns(self, tensor: torch.Tensor) -> bool:
        return any(
            block.ctypes.data <= tensor.data_ptr() < block.ctypes.data + block.nbytes
            for block in self._blocks
        )


_PLAN_MEMORY: ContextVar[_PlanMemory | None] = ContextVar("twinfer_plan_memory", default=None)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _on_device(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function as it stands on the CPU, and the method of the same name elsewhere."""

    @functools.wraps(function)
    def chosen(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = _DEVICE.get()
        if device is None:
            memory = _PLAN_MEMORY.get()
            if memory is not None:
                memory.keep((*args, *kwargs.values()))
            return function(*args, **kwargs)
        elsewhere: Callable[_P, _R] = getattr(device, function.__name__)
        return elsewhere(*args, **kwargs)

    return chosen


@_on_device
def parameter(tensor: torch.Tensor) -> torch.Tensor:
    """A vector of weights (a norm, a bias) or a small table, in the memory and the dtype that the kernels read.

    Args:
        tensor: float32, on the CPU.

    Returns:
        The tensor itself on the CPU.
    """
    return tensor


class _ViewsAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch computes when it is called and not when a plan is replayed; it may only say how memory is to be seen."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it torch would import its compiler first: a second before the first token

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            raise RuntimeError(f"A plan records kernels, and {func} is none: a replay would leave it out.")
        return func(*args, **(kwargs or {}))


class Plan:
    """Kernel calls on the CPU, recorded once and replayed in one call: what a CUDA graph is to a GPU.

    Inside `recording` the functions of this module check their arguments and compute nothing. Every tensor with a row a
    token has `max_num_tokens` rows there, and activations come from `empty`. A replay makes the same calls for any
    number of tokens up to this: the first rows of the same tensors, which it holds.

    Args:
        max_num_tokens, max_num_seqs: of the largest step; at least 1.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, max_num_tokens: int, max_num_seqs: int) -> None:
        self._plan = _cpu.Plan(max_num_tokens, max_num_seqs)
        self._memory = _PlanMemory()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, calls are added to the plan.

        Raises:
            ValueError: a call on another number of rows, or of a kernel that works on sampled rows.
            RuntimeError: torch computes something.
        """
        token = _PLAN_MEMORY.set(self._memory)
        self._plan.begin_recording()
        try:
            with _ViewsAlone():  # type: ignore[no-untyped-call]
                yield
        finally:
            self._plan.end_recording()
            _PLAN_MEMORY.reset(token)

    def replay(self, num_tokens: int, num_seqs: int) -> None:
        """Makes the calls for the first rows of the recorded tensors, without the GIL.

        Raises:
            ValueError: a step that is too large or empty, or a number in its input (an id, a position, a slot, a block)
                that is out of range; then nothing is written.
        """
        self._plan.replay(num_tokens, num_seqs, torch.get_num_threads())

    @property
    def num_calls(self) -> int:
        """Kernel calls a replay makes."""
        return self._plan.num_calls

    @property
    def num_checks(self) -> int:
        """Arrays of a step's input that a replay looks through before it makes the calls."""
        return self._plan.num_checks


@_on_device
def empty(*shape: int) -> torch.Tensor:
    """Memory for activations, in the dtype in which the kernels compute. In a plan that is recorded, the plan's own."""
    memory = _PLAN_MEMORY.get()
    return torch.empty(shape) if memory is None else memory.empty(shape)


@_on_device
def empty_cache(*shape: int) -> torch.Tensor:
    """Zeros for the K or V of one layer. On the CPU they are pages that come into being when first written."""
    return torch.from_numpy(_large_pages(math.prod(shape)).reshape(shape))


_LARGE_PAGE = 2 << 20


def _large_pages(count: int) -> np.ndarray:
    """`count` zeros, float32, in pages of 2 MB where the system has them.

    A sequence's blocks lie scattered over the pool. In pages of 4 KB a decode waits longer for the addresses of its
    pages than for their contents: reading blocks of 12 KB in random order, a Zen 5 core comes to 16 GB/s, and to 24 in
    large pages.
    """
    try:
        pages = mmap.mmap(-1, 4 * count + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError, OverflowError):
        return np.zeros(count, np.float32)  # another system; or too much, of which numpy has the words
    memory = np.frombuffer(pages, np.uint8)
    begin = -memory.ctypes.data % _LARGE_PAGE
    return memory[begin : begin + 4 * count].view(np.float32)


@_on_device
def empty_host_cache(*shape: int) -> torch.Tensor:
    """The same in the CPU's memory, for blocks that are swapped out."""
    return empty_cache(*shape)


@_on_device
def place(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory that the kernels read, its dtype kept. On the CPU it is the tensor itself."""
    return tensor


def trace_kernel(
    ladder: Ladder, operation: str, *arguments: Any, block: tuple[int, int, int] = (0, 0, 0), **named: Any
) -> KernelTrace:
    """Runs one operation of a ladder under the emulator and records what its kernels did to memory.

    `trace_kernel(ladder, "paged_attention", out, query, ..., rung="v2_shared_reduce")` does what
    `ladder.paged_attention(out, query, ..., rung="v2_shared_reduce")` does, some ten times slower.

    Args:
        ladder: its seed and architecture hold; the blocks run on one OS thread.
        operation: a method of `Ladder`.
        arguments, named: for the method.
        block: the block of threads whose events are kept, in each launch that has it. Counts are of all blocks.

    Raises:
        ValueError: no such operation, or as the operation does.
        RuntimeError: as the operation does.
    """
    from fast import _simt_trace

    return record(_simt_trace, ladder, operation, arguments, named, block)


@_on_device
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Copies each token's K and V into its slot of the paged cache.

    Args:
        key, value: [T, Hkv, D], rows.
        k_cache, v_cache: [N, B, Hkv, D], written in place.
        slot_mapping: int64 [T]; slot = block * B + offset in the block.

    Raises:
        ValueError: a bad tensor, or a slot outside [0, N * B); then nothing is written.

    Name and meaning are those of vLLM's `csrc/cache_kernels.cu`.
    """
    _cpu.reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, torch.get_num_threads())


@_on_device
def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """Copies whole blocks within the cache of a layer, all pairs at the same time.

    Args:
        k_cache, v_cache: [N, B, Hkv, D], written in place.
        block_mapping: int64 [P, 2], pairs (from, to); no `to` twice, and none that a pair copies from.

    Name and meaning are those of vLLM's `csrc/cache_kernels.cu`.
    """
    for cache in (k_cache, v_cache):
        swap_blocks(cache, cache, block_mapping)


@_on_device
def swap_blocks(source: torch.Tensor, target: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """Copies whole blocks from one cache to another: [Ns, B, Hkv, D] -> [Nt, B, Hkv, D].

    Args:
        source, target: of a layer's K or V, one of them in the host pool.
        block_mapping: int64 [P, 2], pairs (block of the source, block of the target), no target twice.

    Raises:
        ValueError: a bad tensor, or a block outside its cache; then nothing is written.
    """
    _cpu.swap_blocks(source, target, block_mapping, torch.get_num_threads())


@_on_device
def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> None:
    """Causal attention of a ragged batch, prefill chunks and decodes mixed, over the paged cache.

    The query rows query_start_loc[s] : query_start_loc[s + 1] are the last tokens of sequence s. Each attends
    to itself and to all tokens before it, whose K and V must be in the cache; with a window, to the last
    `sliding_window` of these. Query head h reads KV head h // (H // Hkv).

    Args:
        out: [T, H, D], rows, written.
        query: [T, H, D], rows.
        k_cache, v_cache: [N, B, Hkv, D].
        block_tables: int32 [S, max_blocks], rows; entries past a sequence's last token are not read, nor those
            wholly left of its first query row's window.
        query_start_loc: int32 [S + 1], ascending from 0 to T.
        seq_lens: int32 [S], tokens of each sequence, its query rows included.
        scale: factor on query . key, usually D ** -0.5.
        sliding_window: at least 1, or None for all tokens.

    Raises:
        ValueError: a bad tensor, a window below 1, H no multiple of Hkv, offsets or lengths that do not fit
            together, or a block outside [0, N).

    PagedAttention: Kwon et al., SOSP 2023. Metadata as in vLLM's `v1/attention`.
    """
    _cpu.paged_attention(
        out,
        query,
        k_cache,
        v_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        scale,
        sliding_window,
        torch.get_num_threads(),
    )


# A weight matrix [F, C] in the type its file stores, repacked for the kernel. `num_bytes` are about those of the rows.
PackedMatrix = _cpu.PackedMatrix


@_on_device
def pack(parts: Sequence[tuple[str, torch.Tensor]], in_features: int) -> PackedMatrix:
    """Repacks the rows of a weight matrix, several parts stacked along F, for `linear` and `embedding`.

    Args:
        parts: type and rows as a file stores them, uint8 [rows, bytes of a row], rows. Types are F32, F16, BF16 and,
            of GGUF, Q8_0, Q4_0 and Q4_1, whose rows are blocks of 32 weights. The parts may differ in type.
        in_features: C, the weights of a row.

    Raises:
        ValueError: a bad tensor, an unknown type, or a C that the blocks of a type do not divide.

    On a device it is a `DeviceMatrix` with the same attributes, whose numbers are unpacked.
    """
    return PackedMatrix(list(parts), in_features, torch.get_num_threads())


def _unpacked(parts: Sequence[tuple[str, torch.Tensor]], in_features: int) -> torch.Tensor:
    """The float32 numbers [F, C] of a packed matrix."""
    packed = PackedMatrix(list(parts), in_features, torch.get_num_threads())
    numbers = torch.empty(packed.out_features, in_features)  # [F, C]
    ids = torch.arange(packed.out_features, dtype=torch.int32)
    _cpu.embedding(numbers, ids, packed, torch.get_num_threads())
    return numbers


@_on_device
def linear(
    out: torch.Tensor, x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None = None
) -> None:
    """out = x W^T + bias; weights are decoded inside the kernel, and every output is one sum in the order of C.

    Args:
        out: [T, F], rows, written; not `x`.
        x: [T, C], rows.
        weight: [F, C], packed.
        bias: [F].

    Raises:
        ValueError: a bad tensor.
    """
    _cpu.linear(out, x, weight, bias, torch.get_num_threads())


@_on_device
def linear_silu_and_mul(
    out: torch.Tensor, x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None = None
) -> None:
    """out = silu(gate) * up, where gate and up are the halves of x W^T + bias; neither of them is written.

    Args:
        out: [T, F], rows, written; not `x`.
        x: [T, C], rows.
        weight: [2F, C], packed of two parts of equal size: the rows of the gate, then those of up.
        bias: [2F].

    Raises:
        ValueError: a bad tensor, or a weight that is not two equal parts.

    The numbers are those of `linear` followed by `silu_and_mul`.
    """
    _cpu.linear_silu_and_mul(out, x, weight, bias, torch.get_num_threads())


def linear_argmax(out: torch.Tensor, x: torch.Tensor, weight: PackedMatrix) -> None:
    """out = argmax(x W^T) of each row, the lowest column among equals: what `linear` and a greedy `sample` would give.

    The product itself is never written: of a head with 49,152 outputs it is 192 KB a row. On the CPU alone.

    Args:
        out: int64 [T], written; -1 for a row that contains NaN.
        x: [T, C], rows.
        weight: [F, C], packed.

    Raises:
        ValueError: a bad tensor.
    """
    _cpu.linear_argmax(out, x, weight, torch.get_num_threads())


@_on_device
def embedding(out: torch.Tensor, ids: torch.Tensor, weight: PackedMatrix) -> None:
    """out = rows `ids` of a packed matrix, in float32.

    Args:
        out: [T, C], rows, written.
        ids: int32 [T].
        weight: [F, C], packed.

    Raises:
        ValueError: a bad tensor, or an id outside [0, F); then nothing is written.
    """
    _cpu.embedding(out, ids, weight, torch.get_num_threads())


@_on_device
def position_embedding(out: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """out = rows `positions` of a table.

    Args:
        out: [T, C], rows, written.
        positions: int64 [T].
        table: [P, C].

    Raises:
        ValueError: a bad tensor, or a position outside [0, P); then nothing is written.
    """
    _cpu.position_embedding(out, positions, table, torch.get_num_threads())


@_on_device
def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """out = x / sqrt(mean(x ** 2) + eps) * weight for each row.

    Args:
        out: [T, C], rows, written; may be `x`.
        x: [T, C], rows.
        weight: [C].
        eps: added to the mean of squares.

    Raises:
        ValueError: a bad tensor.

    Zhang and Sennrich, NeurIPS 2019.
    """
    _cpu.rms_norm(out, x, weight, eps, torch.get_num_threads())


@_on_device
def head_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """rms_norm of every head of every row, in place, by one weight for all heads.

    Args:
        x: [T, H, D], rows, updated in place.
        weight: [D].
        eps: added to the mean of squares.

    Raises:
        ValueError: a bad tensor.

    The norm of q and k: Henry et al., "Query-Key Normalization for Transformers" (2020), as Qwen3 uses it.
    """
    _cpu.head_rms_norm(x, weight, eps, torch.get_num_threads())


@_on_device
def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """residual += x, then x = rms_norm(residual), in one pass over each row.

    Args:
        x: [T, C], rows; a layer's output, replaced by the next layer's input.
        residual: [T, C], rows, updated in place.
        weight: [C].
        eps: added to the mean of squares.

    Raises:
        ValueError: a bad tensor.

    Name and meaning are those of vLLM's `csrc/layernorm_kernels.cu`.
    """
    _cpu.fused_add_rms_norm(x, residual, weight, eps, torch.get_num_threads())


@_on_device
def layer_norm(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> None:
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias for each row.

    Args:
        out: [T, C], rows, written; may be `x`.
        x: [T, C], rows.
        weight, bias: [C].
        eps: added to the variance, the mean of the squared distances to the mean.

    Raises:
        ValueError: a bad tensor.

    Ba et al., "Layer Normalization" (2016).
    """
    _cpu.layer_norm(out, x, weight, bias, eps, torch.get_num_threads())


@_on_device
def fused_add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> None:
    """residual += x, then x = layer_norm(residual), in one call.

    Args:
        x: [T, C], rows; a layer's output, replaced by the next layer's input.
        residual: [T, C], rows, updated in place.
        weight, bias: [C].
        eps: added to the variance.

    Raises:
        ValueError: a bad tensor.
    """
    _cpu.fused_add_layer_norm(x, residual, weight, bias, eps, torch.get_num_threads())


@_on_device
def rotary_embedding(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin_cache: torch.Tensor
) -> None:
    """Rotates query and key in place by their positions: dimensions i and i + D/2 form a pair (NeoX style).

    Args:
        positions: int64 [T].
        query: [T, H, D], rows, D even.
        key: [T, Hkv, D], rows.
        cos_sin_cache: [max_pos, D]; row p is the D/2 cosines, then the D/2 sines of position p.

    Raises:
        ValueError: a bad tensor, D odd, or a position outside [0, max_pos); then nothing is written.

    RoFormer: Su et al., 2021. The cache is that of vLLM's `rotary_embedding`.
    """
    _cpu.rotary_embedding(positions, query, key, cos_sin_cache, torch.get_num_threads())


@_on_device
def silu_and_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """out = silu(gate) * up, where a row of `gate_up` is the gate's F numbers, then the F of up.

    Args:
        out: [T, F], rows, written.
        gate_up: [T, 2F], rows.

    Raises:
        ValueError: a bad tensor.

    SwiGLU: Shazeer, 2020. Name as in vLLM's `csrc/activation_kernels.cu`.
    """
    _cpu.silu_and_mul(out, gate_up, torch.get_num_threads())


@_on_device
def gelu(out: torch.Tensor, x: torch.Tensor) -> None:
    """out = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))).

    Args:
        out: [T, F], rows, written; may be `x`.
        x: [T, F], rows.

    Raises:
        ValueError: a bad tensor.

    The tanh form of Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), which GPT-2 uses.
    """
    _cpu.gelu(out, x, torch.get_num_threads())


@_on_device
def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmasks: torch.Tensor) -> None:
    """Lets P of the R rows keep the logits of the tokens whose bit is set; all others become minus infinity.

    A row that contains NaN is left as it is.

    Args:
        logits: [R, V], rows, changed in place.
        rows: int64 [P], ascending.
        bitmasks: int32 [P, cdiv(V, 32)]; bit t % 32 of word t // 32 is token t, bits behind V are not read.

    Raises:
        ValueError: a bad tensor, or a row out of range; then nothing is written.

    The layout is that of llguidance and xgrammar.
    """
    _cpu.apply_token_bitmask(logits, rows, bitmasks, torch.get_num_threads())


@_on_device
def process_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    allowed_starts: torch.Tensor,
    allowed_ids: torch.Tensor,
    masked_starts: torch.Tensor,
    masked_ids: torch.Tensor,
    biased_starts: torch.Tensor,
    biased_ids: torch.Tensor,
    biases: torch.Tensor,
    seen_starts: torch.Tensor,
    seen_ids: torch.Tensor,
    counts: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
) -> None:
    """Masks, biases and penalizes P of the R rows in place; arithmetic as in `reference.contracts.logits`.

    Only listed tokens are touched, but for a row with allowed ids, where all others become minus infinity. A row that
    contains NaN is left as it is. List p of `x_ids` is x_ids[x_starts[p] : x_starts[p + 1]].

    Args:
        logits: [R, V], rows, changed in place.
        rows: int64 [P], ascending.
        allowed_starts, allowed_ids: int64 [P + 1] and int32; ascending ids, an empty list allows all.
        masked_starts, masked_ids: as above; these become minus infinity.
        biased_starts, biased_ids: as above; distinct ids, each with its number in `biases`, float64.
        seen_starts, seen_ids: as above; distinct ids that penalties look at, each with its number of occurrences in
            the output in `counts`, int32 (0: in the prompt only).
        repetition_penalty: float64 [P], finite, above 0.
        presence_penalty, frequency_penalty: float64 [P].

    Raises:
        ValueError: a bad tensor, or a row, id, offset or penalty out of range; then nothing is written.
    """
    _cpu.process_logits(
        logits,
        rows,
        allowed_starts,
        allowed_ids,
        masked_starts,
        masked_ids,
        biased_starts,
        biased_ids,
        biases,
        seen_starts,
        seen_ids,
        counts,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        torch.get_num_threads(),
    )


@_on_device
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    output_positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Draws one token a row: temperature, min_p, top-k, top-p, then argmax of logit / temperature + Gumbel noise.

    A temperature below 1e-5 takes the largest logit. Min_p keeps the tokens at least min_p times as likely as the
    most likely one. Top-k keeps the k largest logits; top-p then keeps the
    smallest set of most likely tokens whose probability reaches top_p, at least one. Equal logits rank by
    ascending token id everywhere. The noise is a function of seed, output position and token id alone (see
    `gumbel_noise`), so a row's token does not depend on the batch. Arithmetic is float64.

    Args:
        logits: [R, V], rows.
        temperature: float64 [R], finite, at least 0.
        top_k: int32 [R]; 0 or -1 is off, more than V is V.
        top_p: float64 [R], in (0, 1].
        min_p: float64 [R], in [0, 1]; 0 is off.
        seeds: int64 [R], the bit pattern of an unsigned 64-bit seed.
        output_positions: int64 [R], place of the drawn token among the request's output tokens, from 0.
        out: int64 [R], written; -1 for a row that contains NaN.

    Raises:
        ValueError: a bad tensor, or a parameter out of range; then nothing is written.
    """
    _cpu.sample(
        logits, temperature, top_k, top_p, min_p, seeds, output_positions, out, torch.get_num_threads()
    )


def gumbel_noise(seed: int, output_position: int, out: torch.Tensor) -> None:
    """Writes the noise that `sample` adds to the logits of token ids 0 .. V-1.

    noise = -log(-log u) with u = (word + 0.5) * 2 ** -32, where word is number id % 4 of Philox4x32-10 with
    the counter (id // 4, output_position, 0, 0) and the key (low 32 bits, high 32 bits) of the seed.

    Args:
        seed: in [0, 2 ** 64).
        output_position: in [0, 2 ** 32).
        out: float64 [V], written.

    Raises:
        ValueError: a bad tensor, or a number out of range.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: expected an unsigned 64-bit number, got {seed}.")
    if not 0 <= output_position < 1 << 32:
        raise ValueError(f"output_position: expected an unsigned 32-bit number, got {output_position}.")
    _cpu.gumbel_noise(seed, output_position, out)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four 32-bit words of Philox4x32-10 for a counter and a key of 32-bit words.

    Raises:
        ValueError: a word outside [0, 2 ** 32).

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    if not all(0 <= word < 1 << 32 for word in (*counter, *key)):
        raise ValueError(f"philox4x32: expected unsigned 32-bit words, got counter {counter} and key {key}.")
    return _cpu.philox4x32(*counter, *key)


def read_bandwidth(num_bytes: int = 1 << 29, seconds: float = 0.5) -> float:
    """Bytes a second that the kernels' threads can read from memory, the best pass of about `seconds`.

    Args:
        num_bytes: size of the buffer, allocated for the call; several times the caches, or they are measured.

    Raises:
        ValueError: `num_bytes` is below 1.
    """
    return _cpu.read_bandwidth(num_bytes, seconds, torch.get_num_threads())


def multiply_add_peak(seconds: float = 0.5) -> float:
    """Floating-point operations a second in registers (a fused multiply-add is two), on all threads, with `isa()`."""
    return _cpu.multiply_add_peak(seconds, torch.get_num_threads())
