"""The layers that work on one row: three RMS norms, two layer norms, rotary_embedding, silu_and_mul, gelu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fast import kernels
from tests.kernels import oracles
from tests.kernels.oracles import ELEMENTWISE_TOLERANCE, assert_close

EPS = 1e-5
SHAPES = [(1, 1), (1, 576), (3, 7), (5, 33), (17, 64), (2, 1000), (300, 576)]  # odd tails, one row, many rows


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def cos_sin_cache(max_pos: int, head_dim: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(max_pos).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_rms_norm_equals_the_formula_and_writes_every_element(shape: tuple[int, int], seed: int) -> None:
    x, weight, out = random(*shape, seed=seed), random(shape[1], seed=seed + 100), poisoned(*shape)
    kernels.rms_norm(out, x, weight, EPS)
    assert_close(
        out, oracles.rms_norm(x.double().numpy(), weight.double().numpy(), EPS), ELEMENTWISE_TOLERANCE
    )


def test_rms_norm_may_write_over_its_input() -> None:
    x, weight = random(5, 576, seed=0), random(576, seed=1)
    out = poisoned(5, 576)
    kernels.rms_norm(out, x, weight, EPS)
    kernels.rms_norm(x, x, weight, EPS)
    assert torch.equal(x, out)


def test_rms_norm_of_zeros_is_zero() -> None:
    out = poisoned(2, 48)
    kernels.rms_norm(out, torch.zeros(2, 48), torch.ones(48), EPS)
    assert torch.equal(out, torch.zeros(2, 48))


@pytest.mark.parametrize("head_dim", [1, 7, 24, 64, 128])
def test_head_rms_norm_equals_the_norm_of_every_head_as_a_row(head_dim: int) -> None:
    x, weight = random(6, 5, head_dim, seed=0), random(head_dim, seed=1)
    normed = poisoned(30, head_dim)
    kernels.rms_norm(normed, x.view(30, head_dim), weight, EPS)
    kernels.head_rms_norm(x, weight, EPS)
    assert torch.equal(x.view(30, head_dim), normed)


def test_head_rms_norm_of_a_qkv_slice_leaves_the_rest_alone() -> None:
    qkv, weight = random(6, 7, 64, seed=0), random(64, seed=1)
    expected = qkv.clone()
    normed = expected[:, 4:6].contiguous()
    kernels.head_rms_norm(normed, weight, EPS)
    expected[:, 4:6] = normed
    kernels.head_rms_norm(qkv[:, 4:6], weight, EPS)
    assert torch.equal(qkv, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_add_rms_norm_updates_the_residual_and_equals_add_then_norm(shape: tuple[int, int]) -> None:
    x, residual, weight = random(*shape, seed=0), random(*shape, seed=1), random(shape[1], seed=2)
    added, normed = x + residual, poisoned(*shape)
    kernels.rms_norm(normed, added, weight, EPS)
    kernels.fused_add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, added)
    assert torch.equal(x, normed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_layer_norm_equals_the_formula_and_writes_every_element(
    shape: tuple[int, int], offset: float
) -> None:
    x, out = random(*shape, seed=0) + offset, poisoned(*shape)
    weight, bias = random(shape[1], seed=1), random(shape[1], seed=2)
    kernels.layer_norm(out, x, weight, bias, EPS)
    expected = oracles.layer_norm(x.double().numpy(), weight.double().numpy(), bias.double().numpy(), EPS)
    # An offset of 20 standard deviations costs the distances to the mean four bits.
    assert_close(out, expected, ELEMENTWISE_TOLERANCE * (1 + offset))


def test_layer_norm_of_equal_numbers_is_the_bias() -> None:
    out, bias = poisoned(2, 48), random(48, seed=0)
    kernels.layer_norm(out, torch.full((2, 48), 2.0), torch.ones(48), bias, EPS)
    assert torch.equal(out, bias.expand(2, 48))


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_add_layer_norm_updates_the_residual_and_equals_add_then_norm(shape: tuple[int, int]) -> None:
    x, residual = random(*shape, seed=0), random(*shape, seed=1)
    weight, bias = random(shape[1], seed=2), random(shape[1], seed=3)
    added, normed = x + residual, poisoned(*shape)
    kernels.layer_norm(normed, added, weight, bias, EPS)
    kernels.fused_add_layer_norm(x, residual, weight, bias, EPS)
    assert torch.equal(residual, added)
    assert torch.equal(x, normed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_gelu_equals_the_formula_also_where_the_tanh_is_flat(shape: tuple[int, int], spread: float) -> None:
    x, out = random(*shape, seed=0) * spread, poisoned(*shape)
    kernels.gelu(out, x)
    assert_close(out, oracles.gelu(x.double().numpy()), ELEMENTWISE_TOLERANCE)
    kernels.gelu(x, x)
    assert torch.equal(x, out)


def test_gelu_at_extremes_is_zero_or_the_number_itself() -> None:
    x = torch.tensor([[-3e38, -1e30, -200.0, 0.0, 200.0, 1e30, 3e38]])
    kernels.gelu(x, x)
    assert torch.equal(x, torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0, 1e30, 3e38]]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_silu_and_mul_equals_the_formula_also_where_the_exponential_overflows(
    shape: tuple[int, int], spread: float
) -> None:
    gate_up = random(shape[0], 2 * shape[1], seed=0) * spread
    out = poisoned(*shape)
    kernels.silu_and_mul(out, gate_up)
    assert_close(out, oracles.silu_and_mul(gate_up.double().numpy()), ELEMENTWISE_TOLERANCE)


def test_silu_and_mul_at_extreme_gates_is_zero_or_the_gate_itself() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    out = poisoned(1, 5)
    kernels.silu_and_mul(out, gate_up)
    assert torch.equal(out, torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e30]]))


@pytest.mark.parametrize("head_dim", [2, 32, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (7, 1)])
def test_rotary_embedding_rotates_query_and_key_in_place(head_dim: int, heads: int, kv_heads: int) -> None:
    cache = cos_sin_cache(50, head_dim)
    positions = torch.tensor([0, 49, 3, 3, 17])
    query, key = random(5, heads, head_dim, seed=0), random(5, kv_heads, head_dim, seed=1)
    expected = [
        oracles.rotary_embedding(positions.numpy(), x.double().numpy(), cache.double().numpy())
        for x in (query, key)
    ]
    kernels.rotary_embedding(positions, query, key, cache)
    assert_close(query, expected[0], ELEMENTWISE_TOLERANCE)
    assert_close(key, expected[1], ELEMENTWISE_TOLERANCE)


def test_rotary_embedding_at_position_zero_changes_nothing() -> None:
    query, key = random(1, 9, 64, seed=0), random(1, 3, 64, seed=1)
    before = query.clone(), key.clone()
    kernels.rotary_embedding(torch.tensor([0]), query, key, cos_sin_cache(4, 64))
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


def test_rotary_embedding_of_qkv_slices_equals_that_of_copies_and_leaves_v_alone() -> None:
    qkv = random(6, (9 + 3 + 3) * 64, seed=0)
    before, cache, positions = qkv.clone(), cos_sin_cache(40, 64), torch.arange(10, 16)
    query, key = before[:, : 9 * 64].reshape(6, 9, 64), before[:, 9 * 64 : 12 * 64].reshape(6, 3, 64)
    kernels.rotary_embedding(positions, query, key, cache)
    kernels.rotary_embedding(
        positions, qkv[:, : 9 * 64].view(6, 9, 64), qkv[:, 9 * 64 : 12 * 64].view(6, 3, 64), cache
    )
    assert torch.equal(qkv[:, : 9 * 64], query.view(6, -1))
    assert torch.equal(qkv[:, 9 * 64 : 12 * 64], key.view(6, -1))
    assert torch.equal(qkv[:, 12 * 64 :], before[:, 12 * 64 :])


def test_a_norm_of_sliced_rows_equals_that_of_a_copy() -> None:
    wide, weight = random(7, 1000, seed=0), random(576, seed=1)
    strided, copied = poisoned(7, 900), poisoned(7, 576)
    kernels.rms_norm(strided[:, 100:676], wide[:, 50:626], weight, EPS)
    kernels.rms_norm(copied, wide[:, 50:626].contiguous(), weight, EPS)
    assert torch.equal(strided[:, 100:676], copied)
    assert strided[:, :100].isnan().all()
    assert strided[:, 676:].isnan().all()


def run_all_layers(rows: torch.Tensor) -> list[torch.Tensor]:
    """Every layer on rows [T, 1536]; what each wrote."""
    num_tokens = rows.shape[0]
    weight, cache = random(1536, seed=1), cos_sin_cache(64, 128)
    normed, gated = poisoned(num_tokens, 1536), poisoned(num_tokens, 768)
    kernels.rms_norm(normed, rows, weight, EPS)
    kernels.silu_and_mul(gated, rows)
    x, residual = rows.clone(), rows.flip(1).contiguous()
    kernels.fused_add_rms_norm(x, residual, weight, EPS)
    rotated, heads = rows.clone().view(num_tokens, 12, 128), rows.clone().view(num_tokens, 12, 128)
    kernels.head_rms_norm(heads, weight[:128].contiguous(), EPS)
    kernels.rotary_embedding(torch.full((num_tokens,), 33), rotated[:, :9], rotated[:, 9:], cache)
    bias, centred, activated = random(1536, seed=2), poisoned(num_tokens, 1536), poisoned(num_tokens, 1536)
    kernels.layer_norm(centred, rows, weight, bias, EPS)
    kernels.gelu(activated, rows)
    return [normed, gated, x, residual, rotated, heads, centred, activated]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_with_any_threads(
    threads: int, use_threads: Callable[[int], None]
) -> None:
    rows = random(200, 1536, seed=0)
    use_threads(threads)
    together = run_all_layers(rows)
    use_threads(1)
    for t in (0, 1, 99, 199):
        for whole, alone in zip(together, run_all_layers(rows[t : t + 1].clone()), strict=True):
            assert torch.equal(whole[t], alone[0])


def test_nan_in_one_row_stays_in_that_row() -> None:
    rows = random(3, 1536, seed=0)
    clean = run_all_layers(rows)
    rows[1, 70] = float("nan")
    for before, after in zip(clean, run_all_layers(rows), strict=True):
        assert after[1].isnan().any()
        assert torch.equal(before[[0, 2]], after[[0, 2]])


def test_no_rows_are_no_work() -> None:
    out = torch.empty(0, 8)
    kernels.rms_norm(out, torch.empty(0, 8), torch.ones(8), EPS)
    kernels.silu_and_mul(out, torch.empty(0, 16))
    assert out.shape == (0, 8)
