"""What the bindings of the CUDA kernels refuse, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fast import kernels
from tests.devices import Elsewhere

LADDER = kernels.ladder("simt")


def decode_arguments() -> dict[str, Any]:
    return {
        "out": torch.full((2, 4, 8), float("nan")),
        "query": torch.zeros(2, 4, 8),
        "k_cache": torch.zeros(3, 4, 2, 8),
        "v_cache": torch.zeros(3, 4, 2, 8),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([5, 8], dtype=torch.int32),
        "scale": 0.3,
    }


def tensor(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 3, 8)}, r"out: expected shape \[S=2, H=3, D=8\], got \[2, 4, 8\]"),
        (
            {"query": torch.zeros(2, 4, 8).double()},
            "query: expected dtype float32, float16 or bfloat16, got float64",
        ),
        ({"v_cache": torch.zeros(3, 4, 2, 8).half()}, "v_cache: expected dtype float32, got float16"),
        ({"k_cache": torch.zeros(3, 4, 8, 2).transpose(2, 3)}, "k_cache: expected a contiguous tensor"),
        (
            {"k_cache": torch.zeros(3, 4, 3, 8), "v_cache": torch.zeros(3, 4, 3, 8)},
            "a multiple of Hkv=3 heads, got 4",
        ),
        (
            {"block_tables": tensor([0, 3], [0, 1])},
            r"block_tables: expected blocks in \[0, 3\), got 3 at entry 1",
        ),
        ({"block_tables": tensor([0, 1], [-1, 1])}, r"got -1 at entry 0 of sequence 1"),
        (
            {"seq_lens": tensor(5, 9)},
            r"seq_lens: expected between 0 and 8 \(max_blocks \* B\) of sequence 1, got 9",
        ),
        ({"seq_lens": tensor(-1, 5)}, "seq_lens: expected between 0 and 8"),
        ({"window": -1}, r"window: expected at least 0 \(off\), got -1"),
        ({"rung": "v9"}, "rung: expected one of v1_naive, v2_shared_reduce, .*v6_tensor_cores, got v9"),
    ],
)
def test_a_bad_argument_of_paged_attention_is_named_and_nothing_is_written(
    changes: dict[str, Any], message: str
) -> None:
    arguments = decode_arguments() | changes
    with pytest.raises(ValueError, match=message):
        LADDER.paged_attention(**arguments)
    assert arguments["out"].isnan().all()


def test_a_head_dim_above_256_is_refused() -> None:
    arguments = decode_arguments() | {name: torch.zeros(2, 4, 257) for name in ("out", "query")}
    arguments |= {name: torch.zeros(3, 4, 2, 257) for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match="D between 1 and 256, got B=4 and D=257"):
        LADDER.paged_attention(**arguments)


def test_tensors_that_are_none_or_elsewhere_are_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"x: expected a torch\.Tensor, got list"):
        LADDER.softmax(x, [[1.0]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x: expected a tensor in CPU memory"):
        LADDER.softmax(x, torch.zeros(2, 8, device="meta"))


def test_rotary_refuses_an_odd_head_and_a_position_past_the_cache() -> None:
    heads, odd = torch.zeros(2, 1, 8), torch.zeros(2, 1, 7)
    with pytest.raises(ValueError, match="query: expected an even head dim D"):
        LADDER.rotary_embedding(torch.tensor([0, 1]), odd, odd.clone(), torch.zeros(4, 7))
    with pytest.raises(
        ValueError, match=r"positions: expected values in \[0, 4\) \(rows of cos_sin_cache\), got 4"
    ):
        LADDER.rotary_embedding(torch.tensor([0, 4]), heads, heads.clone(), torch.zeros(4, 8))


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="x: expected a vocabulary V of at least 1"):
        LADDER.argmax(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "device: expected 'cuda', or 'simt'.*got 'cpu'"),
        ({"seed": -1}, "seed: expected an unsigned 64-bit number, got -1"),
        ({"seed": 2**64}, "seed: expected an unsigned 64-bit number"),
        ({"threads": 0}, "threads: expected at least 1, got 0"),
        ({"architecture": "sm_10"}, "architecture: expected one of sm_80, sm_86, sm_89, sm_90, got sm_10"),
    ],
)
def test_an_option_of_the_emulator_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.ladder(**{"device": "simt"} | options)


def test_tensors_that_work_elsewhere_come_back_with_what_they_share() -> None:
    """How these tests run on a GPU; here the other memory is the CPU's too."""
    qkv = torch.randn(3, 4, 8)
    expected, cache = qkv.clone(), torch.rand(5, 8)
    positions = torch.tensor([4, 0, 2])
    LADDER.rotary_embedding(positions, expected[:, :2], expected[:, 2:3], cache)
    Elsewhere(LADDER, "cpu").rotary_embedding(positions, qkv[:, :2], key=qkv[:, 2:3], cos_sin_cache=cache)
    assert torch.equal(qkv, expected)
