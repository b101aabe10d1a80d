"""The packed matrix product and the rows of an embedding: values, equal bits in any batch, and what is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from fast import kernels
from fast.kernels import PackedMatrix
from reference.contracts.protocols import PACKED_TYPES

TYPES = list(PACKED_TYPES)
QUANTISED = [name for name, (depth, _) in PACKED_TYPES.items() if depth > 1]
# (F, C): the embedded model's, one tile, a part of one, a part of the next, several panels of inputs
SHAPES = [(576, 576), (64, 32), (5, 96), (70, 64), (130, 1536), (1, 32)]
ODD_SHAPES = [(70, 37), (3, 1), (129, 257), (33, 1000)]  # C that no quantised type has
PLAIN_SHAPES = [(name, shape) for name in TYPES if name not in QUANTISED for shape in ODD_SHAPES]
ALL_SHAPES = [(name, shape) for name in TYPES for shape in SHAPES] + PLAIN_SHAPES
EPSILON = 2.0**-24


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def stored_rows(kind: str, shape: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    """Random rows as a file of this type has them, and their float32 numbers as the gguf library decodes them."""
    qtype = gguf.GGMLQuantizationType[kind]
    weight = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    rows = np.ascontiguousarray(gguf.quantize(weight, qtype)).view(np.uint8)
    return torch.from_numpy(rows), gguf.dequantize(rows.view(np.uint8), qtype).astype(np.float32)


def packed(kind: str, shape: tuple[int, int], seed: int = 0) -> tuple[PackedMatrix, np.ndarray]:
    rows, weight = stored_rows(kind, shape, seed)
    return kernels.pack([(kind, rows)], shape[1]), weight


def product(x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = poisoned(len(x), weight.out_features)
    kernels.linear(out, x, weight, bias)
    return out


def assert_is_product(out: torch.Tensor, x: torch.Tensor, weight: np.ndarray) -> None:
    """Within C roundings, each of a partial sum that no sum of |x w| exceeds; in practice a hundredth of that."""
    exact = x.double().numpy() @ weight.astype(np.float64).T
    bound = (
        np.abs(x.double().numpy())
        @ np.abs(weight.astype(np.float64)).T
        * EPSILON
        * min(weight.shape[1] + 1, 12)
    )
    assert (np.abs(out.double().numpy() - exact) <= bound).all()


@pytest.mark.parametrize(("kind", "shape"), ALL_SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 30, 200])
def test_every_type_equals_the_product_with_its_decoded_numbers(
    kind: str, shape: tuple[int, int], num_tokens: int
) -> None:
    matrix, weight = packed(kind, shape)
    x = random(num_tokens, shape[1], seed=1)
    assert_is_product(product(x, matrix), x, weight)


@pytest.mark.parametrize(("kind", "shape"), ALL_SHAPES)
def test_embedding_rows_have_the_same_bits_as_the_decoded_numbers(kind: str, shape: tuple[int, int]) -> None:
    matrix, weight = packed(kind, shape)
    ids = torch.tensor([shape[0] - 1, 0, *range(shape[0])], dtype=torch.int32)
    rows = poisoned(len(ids), shape[1])
    kernels.embedding(rows, ids, matrix)
    np.testing.assert_array_equal(rows.numpy(), weight[ids.numpy()])


@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q8_0"])
def test_the_smallest_and_largest_16_bit_numbers_are_decoded_to_the_same_bits(kind: str) -> None:
    """Subnormal scales among them: all finite 16-bit patterns, as weights or as scales."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))]
    depth, size = PACKED_TYPES[kind]
    if depth == 1:
        rows = np.repeat(halves.view(np.uint8).reshape(-1, 2), 32, axis=0).reshape(-1, 64)
    else:
        rows = np.random.default_rng(0).integers(0, 256, (len(halves), size), dtype=np.uint8)
        rows[:, :2] = halves.view(np.uint8).reshape(-1, 2)
        rows[:, 2:4] = 0 if kind == "Q4_1" else rows[:, 2:4]
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]).astype(np.float32)
    matrix = kernels.pack([(kind, torch.from_numpy(np.ascontiguousarray(rows)))], 32)
    decoded = poisoned(len(rows), 32)
    kernels.embedding(decoded, torch.arange(len(rows), dtype=torch.int32), matrix)
    np.testing.assert_array_equal(decoded.numpy(), expected)
    unit = torch.zeros(1, 32)
    unit[0, 5] = (
        1.0  # the product with a unit vector is a column: the kernel's decoder against the scalar one
    )
    np.testing.assert_array_equal(product(unit, matrix)[0].numpy(), expected[:, 5])
    np.testing.assert_array_equal(
        product(unit.expand(40, 32).contiguous(), matrix)[39].numpy(), expected[:, 5]
    )


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 70])
def test_a_bias_is_added_last_with_the_same_bits_as_a_separate_sum(kind: str, num_tokens: int) -> None:
    matrix, _ = packed(kind, (130, 96))
    x, bias = random(num_tokens, 96, seed=1), random(130, seed=2)
    assert torch.equal(product(x, matrix, bias), product(x, matrix) + bias)


def test_stacked_parts_of_different_types_have_the_same_bits_as_each_alone() -> None:
    x = random(9, 64, seed=1)
    parts = [
        (kind, stored_rows(kind, (rows, 64))[0])
        for kind, rows in zip(TYPES, (5, 64, 70, 1, 33, 128), strict=True)
    ]
    stacked = kernels.pack(parts, 64)
    assert stacked.out_features == 301
    alone = [product(x, kernels.pack([part], 64)) for part in parts]
    assert torch.equal(product(x, stacked), torch.cat(alone, dim=1))


def test_rows_inside_wider_tensors_have_the_same_bits_and_leave_the_rest_alone() -> None:
    matrix, _ = packed("Q4_1", (70, 64))
    wide_x, wide_out = random(6, 100, seed=1), poisoned(6, 90)
    kernels.linear(wide_out[:, 10:80], wide_x[:, 30:94], matrix)
    assert torch.equal(wide_out[:, 10:80], product(wide_x[:, 30:94].contiguous(), matrix))
    assert wide_out[:, :10].isnan().all()
    assert wide_out[:, 80:].isnan().all()


def test_rows_of_a_file_may_lie_apart_when_they_are_packed_to_the_same_bits() -> None:
    rows, _ = stored_rows("Q8_0", (40, 64))
    apart = torch.zeros(40, rows.shape[1] + 7, dtype=torch.uint8)
    apart[:, 3 : 3 + rows.shape[1]] = rows
    x = random(2, 64, seed=1)
    strided = kernels.pack([("Q8_0", apart[:, 3 : 3 + rows.shape[1]])], 64)
    assert torch.equal(product(x, strided), product(x, kernels.pack([("Q8_0", rows)], 64)))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(kind, (330, 608)) for kind in TYPES] + [(kind, (70, 301)) for kind in ("F32", "F16", "BF16")],
)
def test_a_row_has_the_same_bits_alone_in_every_batch_and_with_any_number_of_threads(
    kind: str, shape: tuple[int, int], use_threads: Callable[[int], None]
) -> None:
    """Every path of the kernel: few rows, groups of few, panels, and the split of many rows into chunks."""
    matrix, _ = packed(kind, shape)
    x = random(500, shape[1], seed=1)
    use_threads(1)
    alone = torch.cat([product(x[t : t + 1], matrix) for t in range(len(x))])
    for threads in (1, 2, 3, 4):
        use_threads(threads)
        for num_tokens in [*range(1, 71), 191, 192, 193, 385, 500]:
            first = num_tokens * 7 % (len(x) - num_tokens + 1)
            batch = x[first : first + num_tokens]
            assert torch.equal(product(batch, matrix), alone[first : first + num_tokens]), (
                num_tokens,
                threads,
            )


def test_blocks_of_32_inputs_are_summed_one_after_the_other_each_from_zero() -> None:
    """1 is lost when it is added to 2^24, and kept when 2^24 is gone again: only the stated order gives these sums."""
    matrix = kernels.pack([("F32", torch.ones(70, 96).view(torch.uint8))], 96)
    large, x = 2.0**24, torch.zeros(4, 96)
    x[0, [3, 20, 27, 31]] = torch.tensor([1.0, large, -large, 1.0])  # one block: the first 1 is lost
    x[1, [3, 20, 33, 40]] = torch.tensor([1.0, large, -large, 1.0])  # the first block loses its 1
    x[2, [3, 33, 34, 70]] = torch.tensor(
        [1.0, large, -large, 1.0]
    )  # the second block is zero, nothing is lost
    x[3, [3, 40, 70]] = torch.tensor([1.0, large, -large])  # 1 is lost where the second block is added
    expected = torch.tensor([1.0, 1.0, 2.0, 0.0])
    for num_tokens in (1, 2, 5, 24, 80):
        for t in range(4):
            out = product(x[t].expand(num_tokens, 96).contiguous(), matrix)
            assert torch.equal(out, expected[t].expand(num_tokens, 70)), (num_tokens, t)


def test_nan_and_infinite_numbers_stay_in_their_row() -> None:
    matrix, _ = packed("Q4_1", (70, 64))
    x = random(30, 64, seed=1)
    clean = product(x, matrix)
    x[4, 7], x[11, 0] = float("nan"), float("inf")
    out = product(x, matrix)
    assert out[4].isnan().all()
    assert not out[11].isfinite().any()
    others = [t for t in range(30) if t not in (4, 11)]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize(
    ("kind", "shape"), [*((kind, (330, 96)) for kind in TYPES), ("Q4_1", (64, 32)), ("F32", (3, 5))]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gate_and_up_in_one_call_have_the_bits_of_the_product_and_its_activation(
    kind: str, shape: tuple[int, int], with_bias: bool, use_threads: Callable[[int], None]
) -> None:
    """Of halves that end inside a tile too, and of two types."""
    num_outputs, depth = shape
    gate, up = stored_rows(kind, shape)[0], stored_rows("F32", shape, seed=1)[0]
    matrix = kernels.pack([(kind, gate), ("F32", up)], depth)
    bias = random(2 * num_outputs, seed=2) if with_bias else None
    for threads in (1, 3):
        use_threads(threads)
        for num_tokens in (1, 2, 7, 24, 30, 193, 400):
            x = random(num_tokens, depth, seed=3)
            expected, out = poisoned(num_tokens, num_outputs), poisoned(num_tokens, num_outputs)
            kernels.silu_and_mul(expected, product(x, matrix, bias))
            kernels.linear_silu_and_mul(out, x, matrix, bias)
            assert torch.equal(out, expected), (num_tokens, threads)


def test_a_matrix_of_one_part_has_no_gate() -> None:
    matrix, _ = packed("F32", (6, 4))
    with pytest.raises(ValueError, match="weight: expected two parts of equal size"):
        kernels.linear_silu_and_mul(poisoned(2, 3), random(2, 4, seed=0), matrix)


def largest(x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
    out = torch.full((len(x),), -9)
    kernels.linear_argmax(out, x, weight)
    return out


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_largest_output_of_a_row_is_found_without_writing_the_row(
    kind: str, threads: int, use_threads: Callable[[int], None]
) -> None:
    use_threads(threads)
    matrix, _ = packed(kind, (1330, 96))
    for num_tokens in (1, 2, 5, 30, 400):
        x = random(num_tokens, 96, seed=num_tokens)
        assert torch.equal(largest(x, matrix), product(x, matrix).argmax(dim=1)), num_tokens


@pytest.mark.parametrize("threads", [1, 3])
def test_of_equal_outputs_the_lowest_column_is_the_largest(
    threads: int, use_threads: Callable[[int], None]
) -> None:
    use_threads(threads)
    weight = torch.zeros(3000, 64)
    weight[[70, 71, 500, 2999], 0] = 1.0
    matrix = kernels.pack([("F32", weight.view(torch.uint8))], 64)
    x = torch.zeros(4, 64)
    x[0, 0], x[1, 0], x[2] = 1.0, -1.0, -float("inf")  # 70; all others tie; 0 * inf is NaN
    x[3, 1] = 5.0
    assert largest(x, matrix).tolist() == [70, 0, -1, 0]


def test_a_row_whose_outputs_are_all_minus_infinity_has_its_first_column() -> None:
    matrix = kernels.pack([("F32", torch.full((200, 32), 1e30).view(torch.uint8))], 32)
    x = torch.full((1, 32), -1e30)
    assert product(x, matrix).isinf().all()
    assert largest(x, matrix).tolist() == [0]


@pytest.mark.parametrize("place", [0, 69, 1329])
def test_a_row_with_nan_has_no_largest_output(place: int) -> None:
    weight = random(1330, 32, seed=3)
    weight[place, 4] = float("nan")
    matrix = kernels.pack([("F32", weight.view(torch.uint8))], 32)
    assert largest(random(3, 32, seed=1), matrix).tolist() == [-1, -1, -1]


def test_no_row_is_no_work() -> None:
    matrix, _ = packed("Q4_1", (70, 64))
    assert product(torch.zeros(0, 64), matrix).shape == (0, 70)


DIGEST = """
import hashlib
from tests.kernels import test_linear as t
digest = hashlib.sha256()
for kind, shape in t.ALL_SHAPES:
    matrix, _ = t.packed(kind, shape)
    for num_tokens in (1, 5, 30):
        digest.update(t.product(t.random(num_tokens, shape[1], seed=1), matrix).numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.skipif(kernels.isa() != "avx512", reason="needs a CPU with both instruction sets")
def test_both_fused_instruction_sets_give_the_same_bits(repository: Path) -> None:
    digests = [
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            check=True,
            cwd=repository,
            env={**os.environ, "TWINFER_ISA": isa},
            capture_output=True,
            text=True,
        ).stdout.strip()
        for isa in ("avx2", "avx512")
    ]
    assert len(digests[0]) == 2 * hashlib.sha256().digest_size
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("kind", "row_bytes", "in_features", "message"),
    [
        ("Q4_K", 144, 256, "parts: expected a type among F32, F16, BF16, Q8_0, Q4_0, Q4_1, got Q4_K."),
        ("Q4_1", 20, 33, "in_features: expected a multiple of 32 for Q4_1, got 33."),
        ("Q4_1", 18, 32, r"rows: expected shape \[F=3, row_bytes=20\], got \[3, 18\]."),
        ("F32", 4, 0, "in_features: expected at least 1, got 0."),
    ],
)
def test_rows_that_are_no_matrix_of_their_type_are_refused(
    kind: str, row_bytes: int, in_features: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.pack([(kind, torch.zeros(3, row_bytes, dtype=torch.uint8))], in_features)


def test_a_matrix_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="parts: expected at least one, got none."):
        kernels.pack([], 32)
    with pytest.raises(ValueError, match=r"rows: expected at least one row, got shape \[0, 128\]."):
        kernels.pack([("F32", torch.zeros(0, 128, dtype=torch.uint8))], 32)


@pytest.mark.parametrize("row", [-1, 70])
def test_an_id_outside_the_matrix_is_refused_before_anything_is_written(row: int) -> None:
    matrix, _ = packed("Q4_1", (70, 64))
    out = poisoned(3, 64)
    with pytest.raises(ValueError, match=rf"ids: expected values in \[0, 70\) .* got {row} at index 1"):
        kernels.embedding(out, torch.tensor([0, row, 1], dtype=torch.int32), matrix)
    assert out.isnan().all()
