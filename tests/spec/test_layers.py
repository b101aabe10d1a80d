"""The layers that work on one token: each against its formula in float64, on both tiers."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from reference.contracts.config import RopeScaling
from reference.contracts.rope import rope_frequencies
from tests.tier_arrays import as_tier_array, assert_close, to_numpy

EPSILON = 2.0**-24  # a float32 operation rounds by at most this, relatively


class TierLayers:
    """A tier's layers module and the conversion of its inputs."""

    def __init__(self, tier_name: str) -> None:
        self.tier_name = tier_name
        self.module = importlib.import_module(f"{tier_name}.layers")

    def array(self, values: np.ndarray) -> Any:
        return as_tier_array(self.tier_name, values)


@pytest.fixture
def layers(tier_name: str) -> TierLayers:
    return TierLayers(tier_name)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Linear


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_linear_multiplies_by_the_transpose_of_the_stored_weight(layers: TierLayers, num_tokens: int) -> None:
    x, weight = normal(num_tokens, 576), normal(48, 576, seed=1)
    output = layers.module.Linear(layers.array(weight))(layers.array(x))
    oracle = x.astype(np.float64) @ weight.astype(np.float64).T
    # 576 products of unit size, summed in any order: at most 576 roundings of a partial sum below 100.
    assert_close(output, oracle, 576 * EPSILON * 10)


def test_linear_adds_its_bias_to_every_row(layers: TierLayers) -> None:
    x, weight, bias = normal(5, 64), normal(48, 64, seed=1), normal(48, seed=2)
    output = layers.module.Linear(layers.array(weight), layers.array(bias))(layers.array(x))
    oracle = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    assert_close(output, oracle, 64 * EPSILON * 10)


# RMSNorm


def rms_norm_oracle(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight.astype(np.float64)


# The mean of C squares may round C times, and the square root halves a relative error; the few other operations are
# covered by the rest of the bound. C = 576.
RMS_NORM_TOLERANCE = 300 * EPSILON * 2


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
def test_rms_norm_divides_by_the_root_mean_square_and_scales_each_column(
    layers: TierLayers, num_tokens: int, magnitude: float
) -> None:
    x, weight, eps = normal(num_tokens, 576) * np.float32(magnitude), normal(576, seed=1), 1e-5
    output = layers.module.RMSNorm(layers.array(weight), eps)(layers.array(x))
    assert_close(output, rms_norm_oracle(x, weight, eps), RMS_NORM_TOLERANCE)


def test_rms_norm_with_a_residual_returns_the_normed_sum_and_the_sum(layers: TierLayers) -> None:
    x, residual, weight = normal(5, 576), normal(5, 576, seed=1), normal(576, seed=2)
    normed, new_residual = layers.module.RMSNorm(layers.array(weight), 1e-6)(
        layers.array(x), layers.array(residual)
    )
    assert np.array_equal(to_numpy(new_residual), x + residual)
    assert_close(normed, rms_norm_oracle(x + residual, weight, 1e-6), RMS_NORM_TOLERANCE)


def test_rms_norm_of_zeros_is_zero(layers: TierLayers) -> None:
    output = layers.module.RMSNorm(layers.array(normal(64)), 1e-6)(
        layers.array(np.zeros((2, 64), np.float32))
    )
    assert np.array_equal(to_numpy(output), np.zeros((2, 64)))


@pytest.mark.parametrize("head_dim", [16, 24, 128])
def test_rms_norm_of_heads_normalises_each_head_alone_by_one_weight(
    layers: TierLayers, head_dim: int
) -> None:
    x, weight = normal(5, 3, head_dim) * np.float32([[[1.0], [100.0], [0.01]]]), normal(head_dim, seed=1)
    output = layers.module.RMSNorm(layers.array(weight), 1e-6)(layers.array(x))
    assert_close(output, rms_norm_oracle(x, weight, 1e-6), RMS_NORM_TOLERANCE)


# LayerNorm


def layer_norm_oracle(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps) * weight + bias


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize(("spread", "offset"), [(1e-3, 0.0), (1.0, 3.0), (1e4, -1e3)])
def test_layer_norm_centres_each_row_and_returns_the_sum_beside_it(
    layers: TierLayers, num_tokens: int, spread: float, offset: float
) -> None:
    x, residual = normal(num_tokens, 576) * np.float32(spread), np.full((num_tokens, 576), np.float32(offset))
    weight, bias = normal(576, seed=1), normal(576, seed=2)
    norm = layers.module.LayerNorm(layers.array(weight), layers.array(bias), 1e-5)
    normed, total = norm(layers.array(x), layers.array(residual))
    assert np.array_equal(to_numpy(total), x + residual)
    # A mean of 576 numbers, then as RMSNorm. Offset / spread is at most 3: the difference cancels two bits.
    assert_close(normed, layer_norm_oracle(x + residual, weight, bias, 1e-5), RMS_NORM_TOLERANCE * 4)


def test_layer_norm_of_a_row_far_from_zero_keeps_its_variance(layers: TierLayers) -> None:
    # The variance 2 of a row around 3000 is lost where it is computed as a difference of squares of 9e6.
    row = np.float32([[3000, 3002, 2998, 3000] * 16])
    norm = layers.module.LayerNorm(
        layers.array(np.ones(64, np.float32)), layers.array(np.zeros(64, np.float32)), 0.0
    )
    normed, _ = norm(layers.array(row), layers.array(np.zeros_like(row)))
    assert_close(normed, np.array([[0, 2, -2, 0] * 16]) / np.sqrt(2), 1e-6)


# RotaryEmbedding


def rotary_oracle(positions: np.ndarray, x: np.ndarray, theta: float) -> np.ndarray:
    """Each pair (x[i], x[i + D/2]) as a complex number, turned by position * theta ** (-2i / D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)  # [T, D/2]
    turned = (x[..., :half].astype(np.float64) + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize(("head_dim", "theta"), [(16, 10_000.0), (64, 100_000.0), (128, 500_000.0)])
def test_rotary_turns_pairs_half_a_head_apart_by_position_times_frequency(
    layers: TierLayers, head_dim: int, theta: float
) -> None:
    positions = np.array([0, 1, 2, 17, 300, 2047, 5])
    query, key = normal(7, 9, head_dim), normal(7, 3, head_dim, seed=1)
    rotary = layers.module.RotaryEmbedding(head_dim, 2048, theta)
    outputs = rotary(layers.array(positions), layers.array(query), layers.array(key))
    # Frequency (power, reciprocal) and angle (product) are float32: up to four roundings of an angle of at most
    # `position` radians, times |x| <= 5, plus the roundings of the rotation itself.
    for t, position in enumerate(positions.tolist()):
        tolerance = 5 * EPSILON * (4 * position + 4)
        for x, turned in ((query, outputs[0]), (key, outputs[1])):
            assert_close(
                to_numpy(turned)[t : t + 1],
                rotary_oracle(positions[t : t + 1], x[t : t + 1], theta),
                tolerance,
            )


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_b59_rotary_turns_by_the_scaled_frequencies_and_stretches_by_the_attention_factor(
    layers: TierLayers, rope_type: Any
) -> None:
    scaling = RopeScaling(rope_type, 4.0, 32, beta_fast=8.0, attention_factor=1.25)
    frequencies = rope_frequencies(16, 10_000.0, scaling).astype(np.float64)
    assert not np.array_equal(frequencies, rope_frequencies(16, 10_000.0, None))
    positions, query, key = np.array([0, 3, 100]), normal(3, 4, 16), normal(3, 2, 16, seed=1)
    rotary = layers.module.RotaryEmbedding(16, 128, 10_000.0, scaling)
    outputs = rotary(layers.array(positions), layers.array(query), layers.array(key))
    turn = 1.25 * np.exp(1j * positions[:, None] * frequencies)[:, None, :]  # [T, 1, D/2]
    for x, turned in ((query, outputs[0]), (key, outputs[1])):
        oracle = (x[..., :8].astype(np.float64) + 1j * x[..., 8:]) * turn
        # An angle of at most 100 radians rounds once, |x| <= 5 is stretched by 1.25.
        assert_close(turned, np.concatenate([oracle.real, oracle.imag], axis=-1), 5 * 1.25 * EPSILON * 104)


def test_rotary_at_position_zero_changes_nothing(layers: TierLayers) -> None:
    query, key = normal(1, 4, 16), normal(1, 2, 16, seed=1)
    rotary = layers.module.RotaryEmbedding(16, 32, 10_000.0)
    turned_query, turned_key = rotary(layers.array(np.array([0])), layers.array(query), layers.array(key))
    assert np.array_equal(to_numpy(turned_query), query)
    assert np.array_equal(to_numpy(turned_key), key)


def test_the_score_of_a_turned_query_and_key_depends_on_their_distance_alone(layers: TierLayers) -> None:
    query, key = normal(1, 1, 64).repeat(3, axis=0), normal(1, 1, 64, seed=1).repeat(3, axis=0)
    rotary = layers.module.RotaryEmbedding(64, 512, 10_000.0)
    turned_query, _ = rotary(layers.array(np.array([12, 112, 412])), layers.array(query), layers.array(key))
    _, turned_key = rotary(layers.array(np.array([5, 105, 405])), layers.array(query), layers.array(key))
    scores = np.einsum("thd,thd->t", to_numpy(turned_query).astype(np.float64), to_numpy(turned_key))
    # Angles of up to 412 radians round by 412 * 6e-8 = 2.5e-5 each; 64 terms of unit size carry it into the score.
    assert np.ptp(scores) < 64 * 2.5e-5


# SwiGLU


def gate_up_proj(
    layers: TierLayers, gate: np.ndarray, up: np.ndarray, biases: np.ndarray | None = None
) -> Any:
    """Projections by two weights [F, C] as a tier's model holds them; biases are [2, F]."""
    if layers.tier_name == "reference":
        pair = zip((gate, up), (None, None) if biases is None else biases, strict=True)
        return tuple(layers.module.Linear(weight, bias) for weight, bias in pair)
    from fast import kernels

    parts = [("F32", torch.from_numpy(weight).view(torch.uint8)) for weight in (gate, up)]
    packed = kernels.pack(parts, gate.shape[1])
    return layers.module.Linear(packed, None if biases is None else layers.array(biases.reshape(-1)))


@pytest.mark.parametrize("num_tokens", [1, 6, 40])
def test_swiglu_multiplies_up_by_the_silu_of_the_gate(layers: TierLayers, num_tokens: int) -> None:
    x, weights, biases = normal(num_tokens, 64), normal(2, 96, 64, seed=1) / 4, normal(2, 96, seed=2)
    gate, up = np.einsum("tc,hfc->htf", x.astype(np.float64), weights) + biases[:, None]
    oracle = gate / (1 + np.exp(-gate)) * up
    output = layers.module.swiglu(layers.array(x), gate_up_proj(layers, *weights, biases))
    # Each projection as in the tests of Linear, then up times the other's error; silu's slope is below 1.1.
    assert_close(output, oracle, 64 * EPSILON * 10 * 2 * float(np.abs(up).max()))


def test_swiglu_at_extreme_gates_is_zero_or_the_product_and_never_nan(layers: TierLayers) -> None:
    gates = np.array([-3e38, -1000.0, -90.0, 0.0, 90.0, 1000.0], dtype=np.float32).reshape(-1, 1)  # [F, 1]
    proj = gate_up_proj(layers, gates, np.full((6, 1), 2, np.float32))
    output = to_numpy(layers.module.swiglu(layers.array(np.ones((1, 1), np.float32)), proj))
    assert np.abs(output[0, :3]).max() < 1e-30
    assert output[0, 3:].tolist() == [0.0, 180.0, 2000.0]


# GELU


def test_gelu_is_the_tanh_formula(layers: TierLayers) -> None:
    x = normal(6, 97) * np.float32(3)
    exact = x.astype(np.float64)
    oracle = exact / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    # The angle of up to 40 carries six roundings into the exponential; where it is large, the result is 0 or x.
    assert_close(layers.module.gelu(layers.array(x)), oracle, 16 * EPSILON)


def test_gelu_of_extreme_numbers_is_zero_or_the_number_and_never_nan(layers: TierLayers) -> None:
    x = np.array([[-1e10, -1000.0, -20.0, 0.0, 20.0, 1000.0, 1e10]], dtype=np.float32)
    output = to_numpy(layers.module.gelu(layers.array(x)))
    assert np.abs(output[0, :4]).max() < 1e-30
    assert output[0, 4:].tolist() == [20.0, 1000.0, float(np.float32(1e10))]
