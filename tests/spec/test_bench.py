"""The benchmarks count what they say they count. Speed itself is measured by running them, never by a test."""

from __future__ import annotations

import pytest

from fast.bench import scheduler
from fast.bench.memory import bench_memory
from reference.contracts.protocols import Tier
from reference.frontend.cli import main
from tests.factories import MODEL
from tests.tiny_models import make_tiny_llama


def test_sharing_one_prompt_takes_72_blocks_where_separate_requests_take_360(tier: Tier) -> None:
    shared, cached, separate, contiguous = bench_memory(tier, MODEL)
    assert (shared.peak_blocks, shared.prefill_tokens, shared.copies) == (72, 517, 9)
    # Through the prefix cache alone each request recomputes the 5 tokens of the partly filled block.
    assert (cached.peak_blocks, cached.prefill_tokens, cached.copies) == (72, 517 + 9 * 5, 0)
    assert (separate.peak_blocks, separate.prefill_tokens, separate.copies) == (360, 5170, 0)
    assert contiguous.peak_blocks == 10 * 8192 // 16


def test_bench_memory_prints_the_arithmetic_of_the_model(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two layers, 2 KV heads of 16: 2 x 2 x 2 x 16 x 4 = 512 bytes a token, 8,192 a block; 1 MiB holds 128 blocks."""
    model = str(make_tiny_llama(tmp_path_factory.mktemp("model")))
    assert (
        main(["bench", "memory", "--tier", "reference", "--model", model, "--kv-cache-memory", "1MiB"]) == 0
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "= 512 bytes a token, 8,192 a block." in printed
    assert "1 MiB hold 128 blocks = 2,048 tokens: 4.00 requests of 512 tokens" in printed


def test_bench_scheduler_measures_every_tier(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler, "NUM_RUNNING", 3)
    monkeypatch.setattr(scheduler, "NUM_STEPS", 2)
    assert main(["bench", "scheduler"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "reference",
        "fast",
        "reference / fast",
        "100,000 cached blocks",
        "10,000 waiting",
        "adding a request",
    ):
        assert text in printed


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "colour"]) == 2
    assert "invalid choice" in capsys.readouterr().err
