"""A call of each ladder of CUDA kernels, for `twinfer bench kernels`: small under the emulator, large on a device.

Every tensor of a call is touched from end to end, so that its bytes are what the operation has to move at least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fast import kernels

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Of all calls. The context is longer than the 256 positions of a split, and no multiple of a block or tile."""

    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    seqs: int
    context: int
    chunk: int
    vocab: int
    block: int = 16


SMALL = Sizes(
    tokens=3, hidden=512, heads=6, kv_heads=2, head_dim=64, seqs=2, context=300, chunk=24, vocab=1024
)
LARGE = Sizes(
    tokens=256,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    seqs=32,
    context=1030,
    chunk=500,
    vocab=131072,
)


@dataclass(frozen=True)
class Case:
    """How to call one operation.

    Attributes:
        operation: a key of `Ladder.rungs`.
        method: of `Ladder`.
        dtype: the type that all rungs take.
        make: the arguments, for sizes and a type, on the CPU.
        cpu: the same work by the kernels of `csrc/cpu` in float32, where they have it.
    """

    operation: str
    method: str
    make: Callable[[Sizes, torch.dtype], Arguments]
    dtype: torch.dtype = torch.float32
    cpu: Callable[[Arguments], None] | None = None


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def _rms_norm(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    x = _random(sizes.tokens, sizes.hidden, dtype=dtype)
    return {"out": torch.empty_like(x), "x": x, "weight": _random(sizes.hidden, dtype=dtype), "eps": 1e-5}


def _layer_norm(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    bias = _random(sizes.hidden, dtype=dtype)
    return _rms_norm(sizes, dtype) | {"bias": bias}


def _cache_write(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    tokens = -(-sizes.tokens // sizes.block) * sizes.block
    key, value = (_random(tokens, sizes.kv_heads, sizes.head_dim, dtype=dtype) for _ in range(2))
    caches = [torch.empty(tokens // sizes.block, sizes.block, *key.shape[1:], dtype=dtype) for _ in range(2)]
    return {
        "key": key,
        "value": value,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slot_mapping": torch.arange(tokens).flip(0),
    }


def _cache(blocks: int, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
    return _random(blocks, sizes.block, sizes.kv_heads, sizes.head_dim, dtype=dtype)


def _copy_blocks(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    pairs = max(sizes.tokens // 16, 2)
    mapping = torch.arange(2 * pairs).view(2, pairs).T.contiguous()
    caches = {name: _cache(2 * pairs, sizes, dtype) for name in ("k_cache", "v_cache")}
    return caches | {"block_mapping": mapping}


def _swap_blocks(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    pairs = max(sizes.tokens // 16, 2)
    mapping = torch.arange(pairs)[:, None].repeat(1, 2).contiguous()
    return {
        "source": _cache(pairs, sizes, dtype),
        "target": _cache(pairs, sizes, dtype),
        "block_mapping": mapping,
    }


def _paged(context: list[int], sizes: Sizes, dtype: torch.dtype) -> Arguments:
    """The cache of sequences whose blocks are scattered, and its tables."""
    needed = [-(-length // sizes.block) for length in context]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    tables = torch.zeros(len(context), max(needed), dtype=torch.int32)
    for s, blocks in enumerate(torch.split(order, needed)):
        tables[s, : len(blocks)] = blocks
    return {
        "k_cache": _cache(sum(needed), sizes, dtype),
        "v_cache": _cache(sum(needed), sizes, dtype),
        "block_tables": tables,
        "seq_lens": torch.tensor(context, dtype=torch.int32),
        "scale": sizes.head_dim**-0.5,
    }


def _decode(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    query = _random(sizes.seqs, sizes.heads, sizes.head_dim, dtype=dtype)
    cache = _paged([sizes.context - 9 * s for s in range(sizes.seqs)], sizes, dtype)
    return {"out": torch.empty_like(query), "query": query} | cache


def _prefill(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    """A whole prompt, a chunk of the same length behind as many cached tokens, and a decoded token."""
    rows = [sizes.chunk, sizes.chunk, 1]
    query = _random(sum(rows), sizes.heads, sizes.head_dim, dtype=dtype)
    cache = _paged([sizes.chunk, 2 * sizes.chunk, sizes.chunk], sizes, dtype)
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    return {"out": torch.empty_like(query), "query": query, "query_start_loc": starts} | cache


def _silu(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    gate_up = _random(sizes.tokens, 2 * sizes.hidden, dtype=dtype)
    return {"out": torch.empty(sizes.tokens, sizes.hidden, dtype=dtype), "gate_up": gate_up}


def _gelu(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    x = _random(sizes.tokens, sizes.hidden, dtype=dtype)
    return {"out": torch.empty_like(x), "x": x}


def _rotary(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    return {
        "positions": torch.arange(sizes.tokens),
        "query": _random(sizes.tokens, sizes.heads, sizes.head_dim, dtype=dtype),
        "key": _random(sizes.tokens, sizes.kv_heads, sizes.head_dim, dtype=dtype),
        "cos_sin_cache": _random(sizes.tokens, sizes.head_dim),
    }


def _softmax(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    x = _random(sizes.seqs, sizes.vocab, dtype=dtype)
    return {"out": torch.empty_like(x), "x": x}


def _argmax(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    return {
        "out": torch.empty(sizes.seqs, dtype=torch.int64),
        "x": _random(sizes.seqs, sizes.vocab, dtype=dtype),
    }


def _draws(sizes: Sizes) -> Arguments:
    return {"seeds": torch.arange(sizes.seqs), "output_positions": torch.arange(sizes.seqs)}


def _philox(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    return {"out": torch.empty(sizes.seqs, sizes.vocab, dtype=torch.int32)} | _draws(sizes)


def _penalties(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    """Presence and frequency penalties on every fourth token; no other rule."""
    rows, per_row = sizes.seqs, sizes.vocab // 4
    none = {
        f"{name}_{part}": torch.zeros(rows + 1 if part == "starts" else 0, dtype=kind)
        for name in ("allowed", "masked", "biased")
        for part, kind in (("starts", torch.int64), ("ids", torch.int32))
    }
    return {
        "logits": _random(rows, sizes.vocab),
        "rows": torch.arange(rows),
        **none,
        "biases": torch.zeros(0, dtype=torch.float64),
        "seen_starts": torch.arange(rows + 1) * per_row,
        "seen_ids": (torch.arange(per_row, dtype=torch.int32) * 4).repeat(rows),
        "counts": torch.ones(rows * per_row, dtype=torch.int32),
        "repetition_penalty": torch.ones(rows, dtype=torch.float64),
        "presence_penalty": torch.full((rows,), 0.1, dtype=torch.float64),
        "frequency_penalty": torch.full((rows,), 0.1, dtype=torch.float64),
    }


def _sample(sizes: Sizes, dtype: torch.dtype) -> Arguments:
    def each(value: float, kind: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((sizes.seqs,), value, dtype=kind)

    return {
        "logits": _random(sizes.seqs, sizes.vocab, dtype=dtype),
        "temperature": each(0.8),
        "top_k": each(40, torch.int32),
        "top_p": each(0.95),
        "min_p": each(0.0),
        **_draws(sizes),
        "out": torch.empty(sizes.seqs, dtype=torch.int64),
    }


def _cpu_decode(arguments: Arguments) -> None:
    starts = torch.arange(len(arguments["seq_lens"]) + 1, dtype=torch.int32)
    kernels.paged_attention(**arguments, query_start_loc=starts)


def _cpu(function: Callable[..., None]) -> Callable[[Arguments], None]:
    return lambda arguments: function(**arguments)


_CASES = (
    Case("rms_norm", "rms_norm", _rms_norm, cpu=_cpu(kernels.rms_norm)),
    Case("layer_norm", "layer_norm", _layer_norm, cpu=_cpu(kernels.layer_norm)),
    Case("cache_write", "reshape_and_cache", _cache_write, cpu=_cpu(kernels.reshape_and_cache)),
    Case("copy_blocks", "copy_blocks", _copy_blocks),
    Case("swap_blocks", "swap_blocks", _swap_blocks),
    Case("paged_attention", "paged_attention", _decode, torch.float16, _cpu_decode),
    Case("prefill_attention", "prefill_attention", _prefill, torch.float16, _cpu(kernels.paged_attention)),
    Case("silu_mul", "silu_and_mul", _silu, cpu=_cpu(kernels.silu_and_mul)),
    Case("gelu", "gelu", _gelu, cpu=_cpu(kernels.gelu)),
    Case("rotary", "rotary_embedding", _rotary, cpu=_cpu(kernels.rotary_embedding)),
    Case("softmax", "softmax", _softmax),
    Case("argmax", "argmax", _argmax),
    Case("philox", "philox", _philox),
    Case("penalties", "process_logits", _penalties, cpu=_cpu(kernels.process_logits)),
    Case("topk_topp_sample", "sample", _sample, cpu=_cpu(kernels.sample)),
)
CASES: Mapping[str, Case] = {case.operation: case for case in _CASES}


def on_gpu(arguments: Arguments) -> Arguments:
    """The same call with its tensors on the GPU."""
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }


def useful_bytes(arguments: Arguments) -> int:
    """Bytes of all tensors of a call: what has to be read or written at least once."""
    tensors = (value for value in arguments.values() if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
