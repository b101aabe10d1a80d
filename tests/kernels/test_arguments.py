"""Every argument of every kernel: a wrong dtype, shape, device or layout is one sentence that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fast import kernels

Call = tuple[Callable[..., None], dict[str, Any]]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def valid_calls() -> dict[str, Call]:
    """One valid call of each kernel, by name."""
    zeros = torch.zeros
    caches = {"k_cache": zeros(6, 4, 2, 8), "v_cache": zeros(6, 4, 2, 8)}
    return {
        "reshape_and_cache": (
            kernels.reshape_and_cache,
            {"key": zeros(3, 2, 8), "value": zeros(3, 2, 8), **caches, "slot_mapping": torch.arange(3)},
        ),
        "paged_attention": (
            kernels.paged_attention,
            {
                "out": zeros(3, 4, 8),
                "query": zeros(3, 4, 8),
                **caches,
                "block_tables": zeros(2, 5, dtype=torch.int32),
                "query_start_loc": ints(0, 2, 3),
                "seq_lens": ints(7, 1),
                "scale": 0.5,
            },
        ),
        "rms_norm": (
            kernels.rms_norm,
            {"out": zeros(3, 8), "x": zeros(3, 8), "weight": zeros(8), "eps": 1e-5},
        ),
        "head_rms_norm": (
            kernels.head_rms_norm,
            {"x": zeros(3, 4, 8), "weight": zeros(8), "eps": 1e-5},
        ),
        "fused_add_rms_norm": (
            kernels.fused_add_rms_norm,
            {"x": zeros(3, 8), "residual": zeros(3, 8), "weight": zeros(8), "eps": 1e-5},
        ),
        "layer_norm": (
            kernels.layer_norm,
            {"out": zeros(3, 8), "x": zeros(3, 8), "weight": zeros(8), "bias": zeros(8), "eps": 1e-5},
        ),
        "fused_add_layer_norm": (
            kernels.fused_add_layer_norm,
            {"x": zeros(3, 8), "residual": zeros(3, 8), "weight": zeros(8), "bias": zeros(8), "eps": 1e-5},
        ),
        "rotary_embedding": (
            kernels.rotary_embedding,
            {
                "positions": torch.arange(3),
                "query": zeros(3, 4, 8),
                "key": zeros(3, 2, 8),
                "cos_sin_cache": zeros(10, 8),
            },
        ),
        "silu_and_mul": (kernels.silu_and_mul, {"out": zeros(3, 8), "gate_up": zeros(3, 16)}),
        "gelu": (kernels.gelu, {"out": zeros(3, 8), "x": zeros(3, 8)}),
        "apply_token_bitmask": (
            kernels.apply_token_bitmask,
            {
                "logits": zeros(3, 40),
                "rows": torch.tensor([0, 2]),
                "bitmasks": ints(-1, 255, 7, 1).view(2, 2),
            },
        ),
        "process_logits": (
            kernels.process_logits,
            {
                "logits": zeros(3, 9),
                "rows": torch.tensor([0, 2]),
                "allowed_starts": torch.tensor([0, 2, 2]),
                "allowed_ids": ints(1, 8),
                "masked_starts": torch.tensor([0, 0, 2]),
                "masked_ids": ints(5, 6),
                "biased_starts": torch.tensor([0, 1, 3]),
                "biased_ids": ints(1, 0, 7),
                "biases": torch.ones(3, dtype=torch.float64),
                "seen_starts": torch.tensor([0, 2, 4]),
                "seen_ids": ints(3, 1, 8, 2),
                "counts": ints(0, 1, 2, 3),
                "repetition_penalty": torch.ones(2, dtype=torch.float64),
                "presence_penalty": zeros(2, dtype=torch.float64),
                "frequency_penalty": zeros(2, dtype=torch.float64),
            },
        ),
        "sample": (
            kernels.sample,
            {
                "logits": zeros(3, 9),
                "temperature": zeros(3, dtype=torch.float64),
                "top_k": ints(0, 0, 0),
                "top_p": torch.ones(3, dtype=torch.float64),
                "min_p": zeros(3, dtype=torch.float64),
                "seeds": torch.arange(3),
                "output_positions": torch.arange(3),
                "out": torch.arange(3),
            },
        ),
        "gumbel_noise": (
            kernels.gumbel_noise,
            {"seed": 0, "output_position": 0, "out": zeros(9, dtype=torch.float64)},
        ),
    }


TENSOR_ARGUMENTS = [
    (kernel, name)
    for kernel, (_, arguments) in valid_calls().items()
    for name, value in arguments.items()
    if isinstance(value, torch.Tensor)
]
FREE_SIZES = {  # no other argument has a dimension of this size
    ("gumbel_noise", "out"),
    ("apply_token_bitmask", "logits"),
    ("process_logits", "logits"),
    ("process_logits", "allowed_ids"),
    ("process_logits", "masked_ids"),
}
DTYPE_TEXT = {torch.float32: "float32", torch.float64: "float64", torch.int32: "int32", torch.int64: "int64"}


def call_with(kernel: str, name: str, change: Callable[[torch.Tensor], object]) -> None:
    function, arguments = valid_calls()[kernel]
    function(**{**arguments, name: change(arguments[name])})


@pytest.mark.parametrize("kernel", valid_calls())
def test_the_valid_call_is_accepted(kernel: str) -> None:
    function, arguments = valid_calls()[kernel]
    function(**arguments)


@pytest.mark.parametrize(("kernel", "name"), TENSOR_ARGUMENTS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16, torch.bool]
)
def test_another_dtype_is_refused(kernel: str, name: str, dtype: torch.dtype) -> None:
    wanted = valid_calls()[kernel][1][name].dtype
    if dtype == wanted:
        return call_with(kernel, name, lambda tensor: tensor.to(dtype))
    given = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"^{name}: expected dtype {DTYPE_TEXT[wanted]}, got {given}"):
        call_with(kernel, name, lambda tensor: tensor.to(dtype))


@pytest.mark.parametrize(("kernel", "name"), TENSOR_ARGUMENTS)
def test_another_number_of_dimensions_is_refused(kernel: str, name: str) -> None:
    dims = valid_calls()[kernel][1][name].ndim
    with pytest.raises(ValueError, match=rf"^{name}: expected {dims} dimensions \[.*\], got shape \[1, "):
        call_with(kernel, name, lambda tensor: tensor[None])
    with pytest.raises(ValueError, match=rf"^{name}: expected {dims} dimensions"):
        call_with(kernel, name, lambda tensor: torch.zeros((), dtype=tensor.dtype))


@pytest.mark.parametrize(("kernel", "name"), [pair for pair in TENSOR_ARGUMENTS if pair not in FREE_SIZES])
def test_a_tensor_that_does_not_fit_the_others_is_refused(kernel: str, name: str) -> None:
    """The first tensor with a size sets it: the sentence may name another argument, but shows both sizes."""

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        outermost_is_free = name in ("k_cache", "v_cache", "cos_sin_cache")  # N and max_pos are their own
        outermost_is_free |= kernel == "head_rms_norm" and name == "x"  # in place: no other tensor has T
        shape[-1 if outermost_is_free else 0] += 1
        return torch.zeros(shape, dtype=tensor.dtype)

    with pytest.raises(ValueError, match=r"^\w+: expected shape \[.*=\d+.*\], got \[[\d, ]+\]\.$"):
        call_with(kernel, name, longer)


@pytest.mark.parametrize(("kernel", "name"), TENSOR_ARGUMENTS)
def test_a_tensor_without_memory_on_the_cpu_is_refused(kernel: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor (in CPU memory|on the CPU), got one"):
        call_with(kernel, name, lambda tensor: tensor.to("meta"))


@pytest.mark.parametrize(("kernel", "name"), TENSOR_ARGUMENTS)
def test_gaps_inside_a_row_are_refused(kernel: str, name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name}: expected .*contiguous.*, got shape \[.*\] with strides \[.*2\]"
    ):
        call_with(kernel, name, lambda tensor: torch.stack([tensor, tensor], -1)[..., 0])


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("reshape_and_cache", "key"),
        ("paged_attention", "query"),
        ("paged_attention", "out"),
        ("rotary_embedding", "query"),
        ("rms_norm", "out"),
        ("sample", "logits"),
        ("apply_token_bitmask", "logits"),
        ("process_logits", "logits"),
    ],
)
def test_rows_that_overlap_are_refused(kernel: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected rows that are contiguous and do not overlap"):
        call_with(kernel, name, lambda tensor: tensor[:1].expand_as(tensor))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("kernel", ["reshape_and_cache", "paged_attention"])
def test_a_cache_in_pieces_is_refused(kernel: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a contiguous tensor"):
        call_with(kernel, name, lambda tensor: torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]])


@pytest.mark.parametrize(("kernel", "name"), TENSOR_ARGUMENTS)
@pytest.mark.parametrize("value", [None, [1.0, 2.0], 3])
def test_what_is_no_tensor_is_refused(kernel: str, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a torch.Tensor, got {type(value).__name__}"):
        call_with(kernel, name, lambda _: value)


def test_rotary_embedding_refuses_an_odd_head_dim() -> None:
    query, key = torch.zeros(1, 2, 5), torch.zeros(1, 1, 5)
    with pytest.raises(ValueError, match=r"query: expected an even head dim D, got shape \[1, 2, 5\]"):
        kernels.rotary_embedding(torch.tensor([0]), query, key, torch.zeros(3, 5))


@pytest.mark.parametrize("position", [-1, 10])
def test_rotary_embedding_refuses_a_position_out_of_range_and_writes_nothing(position: int) -> None:
    query, key, cache = torch.ones(3, 4, 8), torch.ones(3, 2, 8), torch.zeros(10, 8)
    with pytest.raises(
        ValueError, match=rf"positions: expected values in \[0, 10\).*got {position} at index 2"
    ):
        kernels.rotary_embedding(torch.tensor([0, 1, position]), query, key, cache)
    assert query.eq(1).all()
    assert key.eq(1).all()


def test_parameters_and_inference_tensors_are_tensors() -> None:
    with torch.inference_mode():
        x, out = torch.ones(2, 8), torch.zeros(2, 8)
        kernels.rms_norm(out, x, torch.nn.Parameter(torch.ones(8)), 0.0)
    assert torch.equal(out, x)


def test_arrays_that_only_have_dlpack_capsules_work_too() -> None:
    """The path of torch versions without the C exchange table; NumPy has none either."""
    gate_up, out = np.arange(32, dtype=np.float32).reshape(2, 16), np.full((2, 8), np.nan, dtype=np.float32)
    from_torch = torch.empty(2, 8)
    kernels.silu_and_mul(from_torch, torch.from_numpy(gate_up))
    kernels.silu_and_mul(out, gate_up)  # type: ignore[arg-type]
    np.testing.assert_array_equal(out, from_torch.numpy())
    with pytest.raises(ValueError, match=r"gate_up: expected shape \[T=2, 2F=16\], got \[2, 8\]"):
        kernels.silu_and_mul(out, gate_up[:, :8])  # type: ignore[arg-type]


class OlderTensor(torch.Tensor):
    """As torch makes them before it has the table of C functions."""

    __dlpack_c_exchange_api__ = None


def test_tensors_of_a_torch_without_the_c_table_go_through_capsules() -> None:
    x, weight = torch.randn(3, 16)[:, :8], torch.rand(8)
    expected, out = torch.empty(3, 8), torch.empty(3, 8)
    kernels.rms_norm(expected, x, weight, 1e-5)
    older = [tensor.as_subclass(OlderTensor) for tensor in (out, x, weight)]  # type: ignore[no-untyped-call]
    kernels.rms_norm(*older, 1e-5)  # type: ignore[arg-type, call-arg]
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match=r"out: expected shape \[T=3, C=4\], got \[3, 8\]"):
        kernels.rms_norm(older[0], older[1][:, :4], older[2], 1e-5)


def test_the_capsule_of_a_tensor_on_a_gpu_makes_no_stream_wait() -> None:
    """Waiting for the default stream is what an older torch does by itself, and no CUDA graph can be recorded then."""
    streams = []

    class OnGpu:
        is_cuda = True

        def __dlpack__(self, stream: int | None = None) -> Any:
            streams.append(stream)
            return np.ones(8, dtype=np.float32).__dlpack__()

    out, x = torch.empty(2, 8), torch.ones(2, 8)
    kernels.rms_norm(out, x, OnGpu(), 0.0)  # type: ignore[arg-type]
    assert streams == [-1]
    assert torch.equal(out, x)


def test_a_read_only_array_is_refused_with_the_reason() -> None:
    weight = np.ones(8, dtype=np.float32)
    weight.flags.writeable = False
    with pytest.raises(ValueError, match=r"^weight: expected a tensor in CPU memory, .*\("):
        kernels.rms_norm(torch.empty(2, 8), torch.ones(2, 8), weight, 0.0)  # type: ignore[arg-type]
