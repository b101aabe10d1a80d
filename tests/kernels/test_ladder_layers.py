"""The CUDA kernels that work on one row or one token, rung by rung, under the emulator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fast import kernels
from tests.kernels import oracles
from tests.kernels.ladders import ELEMENTWISE, Rung, every_dtype, every_rung, padded, poisoned, random
from tests.kernels.oracles import assert_close

EPS = 1e-5
# (T, C): one number, odd tails, the hidden size of the embedded model, more than one round of a block's 256 threads.
SHAPES = [(1, 1), (3, 7), (2, 33), (5, 64), (3, 576), (1, 2056)]
# Rows of these are whole numbers of 16 bytes in every type; the vectorised rungs refuse others.
ALIGNED = [(1, 8), (5, 64), (3, 576), (1, 2056)]


def shapes_for(rung: Rung) -> list[tuple[int, int]]:
    return ALIGNED if "vectorised" in rung.name else SHAPES


@every_rung("rms_norm")
@every_dtype
def test_rms_norm_equals_the_formula_and_writes_every_element(rung: Rung, dtype: torch.dtype) -> None:
    for rows, size in shapes_for(rung):
        x, weight = random(rows, size, dtype=dtype, seed=rows), random(size, dtype=dtype, seed=100)
        out = padded(poisoned(rows, size, dtype=dtype), 8)
        rung.ladder.rms_norm(out, padded(x, 16), weight, EPS, rung.name)
        expected = oracles.rms_norm(x.double().numpy(), weight.double().numpy(), EPS)
        assert_close(out, expected, ELEMENTWISE[dtype])


@every_rung("rms_norm")
@every_dtype
def test_fused_add_rms_norm_is_the_norm_of_the_residual_that_it_stored(
    rung: Rung, dtype: torch.dtype
) -> None:
    for rows, size in shapes_for(rung):
        x, residual = random(rows, size, dtype=dtype, seed=1), random(rows, size, dtype=dtype, seed=2)
        weight = random(size, dtype=dtype, seed=3)
        added = x + residual  # rounded once to dtype
        rung.ladder.fused_add_rms_norm(x, residual, weight, EPS, rung.name)
        assert torch.equal(residual, added)
        expected = oracles.rms_norm(added.double().numpy(), weight.double().numpy(), EPS)
        assert_close(x, expected, ELEMENTWISE[dtype])


@every_rung("rms_norm")
def test_rms_norm_may_write_over_its_input(rung: Rung) -> None:
    x, weight = random(3, 576, dtype=torch.float32, seed=0), random(576, dtype=torch.float32, seed=1)
    out = torch.empty_like(x)
    rung.ladder.rms_norm(out, x, weight, EPS, rung.name)
    rung.ladder.rms_norm(x, x, weight, EPS, rung.name)
    assert torch.equal(x, out)


@every_rung("layer_norm")
@every_dtype
def test_layer_norm_equals_the_formula_and_writes_every_element(rung: Rung, dtype: torch.dtype) -> None:
    for rows, size in SHAPES:
        x, out = random(rows, size, dtype=dtype, seed=rows), padded(poisoned(rows, size, dtype=dtype), 8)
        weight, bias = random(size, dtype=dtype, seed=100), random(size, dtype=dtype, seed=200)
        rung.ladder.layer_norm(out, padded(x, 16), weight, bias, EPS, rung.name)
        expected = oracles.layer_norm(*(t.double().numpy() for t in (x, weight, bias)), EPS)
        assert_close(out, expected, ELEMENTWISE[dtype])


@every_rung("layer_norm")
def test_layer_norm_does_not_cancel_far_from_zero_and_may_write_over_its_input(rung: Rung) -> None:
    """At mean 1000 the difference of mean(x ** 2) and mean(x) ** 2 has no correct digit in float32."""
    x = random(2, 576, dtype=torch.float32, seed=0) + 1000.0
    ones, zeros = torch.ones(576), torch.zeros(576)
    expected = oracles.layer_norm(x.double().numpy(), ones.double().numpy(), zeros.double().numpy(), EPS)
    rung.ladder.layer_norm(x, x, ones, zeros, EPS, rung.name)
    assert_close(x, expected, 1e-4)  # the mean itself is rounded at 1000 * 6e-8


@every_rung("gelu")
@every_dtype
def test_gelu_equals_the_formula_and_writes_every_element(rung: Rung, dtype: torch.dtype) -> None:
    for rows, size in shapes_for(rung):
        x, out = random(rows, size, dtype=dtype, seed=size), padded(poisoned(rows, size, dtype=dtype), 8)
        rung.ladder.gelu(out, padded(x, 8), rung.name)
        assert_close(out, oracles.gelu(x.double().numpy()), ELEMENTWISE[dtype])


@every_rung("silu_mul")
@every_dtype
def test_silu_and_mul_equals_the_formula_and_writes_every_element(rung: Rung, dtype: torch.dtype) -> None:
    for rows, size in shapes_for(rung):
        gate_up = random(rows, 2 * size, dtype=dtype, seed=size)
        out = padded(poisoned(rows, size, dtype=dtype), 8)
        rung.ladder.silu_and_mul(out, padded(gate_up, 8), rung.name)
        assert_close(out, oracles.silu_and_mul(gate_up.double().numpy()), ELEMENTWISE[dtype])


def cos_sin_cache(max_pos: int, head_dim: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(max_pos).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


@every_rung("rotary")
@every_dtype
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (1, 1, 2), (3, 1, 34), (2, 2, 256)])
def test_rotary_embedding_equals_the_formula_and_leaves_the_rest_of_the_row_alone(
    rung: Rung, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    qkv = random(5, heads + 2 * kv_heads, head_dim, dtype=dtype, seed=heads)
    positions, cache = torch.tensor([0, 1, 77, 3, 50]), cos_sin_cache(78, head_dim)
    turned = oracles.rotary_embedding(
        positions.numpy(), qkv[:, : heads + kv_heads].double().numpy(), cache.double().numpy()
    )
    values = qkv[:, heads + kv_heads :].clone()
    rung.ladder.rotary_embedding(
        positions, qkv[:, :heads], qkv[:, heads : heads + kv_heads], cache, rung.name
    )
    assert_close(qkv[:, : heads + kv_heads], turned, ELEMENTWISE[dtype])
    assert torch.equal(qkv[:, heads + kv_heads :], values)


@every_rung("softmax")
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 300), (1, 2000)])
def test_softmax_equals_the_formula_and_writes_every_element(
    rung: Rung, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = random(*shape, dtype=dtype, seed=0) * 3
    x[0, 0] = float("-inf") if shape[1] > 1 else -3e4  # a masked token has no probability
    out = padded(poisoned(*shape, dtype=dtype), 8)
    rung.ladder.softmax(out, padded(x, 8), rung.name)
    weights = np.exp(x.double().numpy() - x.double().numpy().max(axis=1, keepdims=True))
    assert_close(out, weights / weights.sum(axis=1, keepdims=True), ELEMENTWISE[dtype])


@every_rung("softmax")
def test_softmax_of_a_row_with_nan_or_no_finite_number_is_nan_and_other_rows_are_untouched(
    rung: Rung,
) -> None:
    x = random(4, 300, dtype=torch.float32, seed=0)
    clean = torch.empty_like(x)
    rung.ladder.softmax(clean, x, rung.name)
    x[0, 299], x[1, 17], x[2] = float("nan"), float("inf"), float("-inf")
    out = torch.empty_like(x)
    rung.ladder.softmax(out, x, rung.name)
    assert out[:3].isnan().all()
    assert torch.equal(out[3], clean[3])


@every_rung("argmax")
@every_dtype
@pytest.mark.parametrize("size", [1, 2, 31, 257, 1500])
def test_argmax_takes_the_first_of_the_largest(rung: Rung, dtype: torch.dtype, size: int) -> None:
    x = random(4, size, dtype=dtype, seed=size).round()  # many equal numbers
    out = torch.full((4,), -7)
    rung.ladder.argmax(out, padded(x, 3), rung.name)
    assert out.tolist() == np.argmax(x.double().numpy(), axis=1).tolist()


@every_rung("argmax")
@pytest.mark.parametrize("where", [0, 31, 255, 256, 299])
def test_argmax_of_a_row_with_nan_is_minus_one_and_infinities_are_numbers(rung: Rung, where: int) -> None:
    x = random(4, 300, dtype=torch.float32, seed=0)
    x[0, where] = float("nan")
    x[1, where] = float("inf")
    x[2] = float("-inf")
    x[3, (where + 1) % 300] = 50.0
    out = torch.full((4,), -7)
    rung.ladder.argmax(out, x, rung.name)
    assert out.tolist() == [-1, where, 0, (where + 1) % 300]


def test_the_best_rung_takes_rows_that_no_vector_fits() -> None:
    ladder = kernels.ladder("simt")
    x, weight = random(3, 7, dtype=torch.float16, seed=0), random(7, dtype=torch.float16, seed=1)
    best, third = poisoned(3, 7, dtype=torch.float16), poisoned(3, 7, dtype=torch.float16)
    ladder.rms_norm(best, x, weight, EPS)
    ladder.rms_norm(third, x, weight, EPS, "v3_shuffle")
    assert torch.equal(best, third)
    with pytest.raises(ValueError, match="rung: expected rows of a multiple of 16 bytes"):
        ladder.rms_norm(best, x, weight, EPS, "v4_vectorised")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_are_no_work(dtype: torch.dtype) -> None:
    ladder = kernels.ladder("simt")
    empty = torch.empty(0, 8, dtype=dtype)
    ladder.rms_norm(empty, empty, torch.ones(8, dtype=dtype), EPS)
    ladder.silu_and_mul(empty, torch.empty(0, 16, dtype=dtype))
    ladder.softmax(empty, empty)
    ladder.argmax(torch.empty(0, dtype=torch.int64), empty)
