"""The benchmarks of a whole engine, on a tiny model: what they run, count, print and save. No time is asserted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast import kernels
from fast.bench import results, roofline
from fast.bench.engines import blocks_for
from fast.bench.replay import replay
from fast.bench.roofline import CountingCheckpoint, Peaks, Weights, better, floor_of, shares, step_work
from fast.bench.runner import make_engine, percentiles_ms, run_workload
from fast.bench.workloads import make_workload
from reference.contracts.config import CacheConfig, EngineConfig, SchedulerConfig
from reference.contracts.protocols import Tier
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.cli import main
from reference.frontend.engine_args import EngineArgs
from reference.frontend.tiers import load_tier
from tests.factories import MODEL
from tests.tiny_models import make_tiny_llama, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model"), max_position=2048))


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The JSON of a benchmark."""
    assert main(["bench", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["uniform", "prefix", "chat"])
def test_every_request_of_a_workload_gets_its_tokens_and_their_times(
    tier: Tier, model: str, name: str
) -> None:
    workload = make_workload(name, 3, vocab_size=320)
    run = run_workload(make_engine(EngineArgs(model=model), tier), workload)
    assert [r.num_output_tokens for r in run.requests] == [r.max_tokens for r in workload.requests]
    for request, asked in zip(run.requests, workload.requests, strict=True):
        assert len(request.gaps) == asked.max_tokens - 1
        assert 0 < request.ttft <= request.latency <= run.seconds
    if name != "uniform":
        assert run.num_cached_tokens > 0
    if name == "chat":  # each turn finds all full blocks of what was said before
        assert run.requests[-1].num_cached_tokens >= run.requests[-4].num_prompt_tokens


def test_a_timed_run_has_the_steps_that_the_replay_counts(tier: Tier, model: str) -> None:
    workload = make_workload("mixed", 6, vocab_size=320)
    engine = make_engine(EngineArgs(model=model, max_num_batched_tokens=128, max_num_seqs=4), tier)
    assert run_workload(engine, workload).num_steps == len(replay(tier, engine.config, workload))


def test_each_run_begins_with_a_cold_prefix_cache(tier: Tier, model: str) -> None:
    engine = make_engine(EngineArgs(model=model), tier)
    workload = make_workload("prefix", 2, vocab_size=320)
    first, second = (run_workload(engine, workload) for _ in range(2))
    assert first.num_cached_tokens == second.num_cached_tokens == 512


def test_throughput_prints_a_row_a_workload_and_saves_json_and_picture(
    tier_name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["throughput", "--model", model, "--tier", tier_name, "--num-requests", "2", "--repeat", "2"]
    assert main(["bench", *command, "--workload", "uniform", "chat"]) == 0
    printed = capsys.readouterr().out
    assert "uniform" in printed
    assert "chat" in printed
    document = bench(capsys, *command, "--workload", "uniform", "--save", str(tmp_path / "deep" / "t"))
    assert document == json.loads((tmp_path / "deep" / "t.json").read_text())
    assert (tmp_path / "deep" / "t.png").read_bytes().startswith(b"\x89PNG")
    assert (document["benchmark"], document["tier"]) == ("throughput", tier_name)
    assert set(document["machine"]) >= {"cpu", "cores", "load_before"}
    figures = document["workloads"]["uniform"]
    assert (figures["requests"], figures["prompt_tokens"], figures["output_tokens"]) == (2, 128, 128)
    assert len(figures["tokens_per_s_runs"]) == 2


def test_latency_has_a_row_for_each_batch_size(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = bench(capsys, "latency", "--model", model, "--batch-size", "1", "3", "--repeat", "1")
    assert [row["batch_size"] for row in document["batches"]] == [1, 3]
    for row in document["batches"]:
        for kind in ("ttft_ms", "itl_ms", "e2e_ms"):
            assert 0 < row[kind]["p50"] <= row[kind]["p90"] <= row[kind]["p99"]


def test_the_sweep_over_max_num_seqs_preempts_nobody(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = bench(capsys, "seqs", "--model", model, "--limits", "4", "1", "--num-requests", "4")
    assert [row["max_num_seqs"] for row in document["limits"]] == [1, 4]
    workload = make_workload("mixed", 4, vocab_size=320)
    assert blocks_for(workload, 1, 16) < blocks_for(workload, 4, 16)
    assert document["limits"][1]["num_blocks"] == blocks_for(workload, 4, 16) + 1
    main(
        [
            "bench",
            "seqs",
            "--model",
            model,
            "--limits",
            "2",
            "--num-requests",
            "2",
            "--save",
            str(tmp_path / "s"),
        ]
    )
    assert (tmp_path / "s.png").exists()


def test_smaller_blocks_waste_less_and_contiguous_memory_most(
    tier_name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("blocksize", "--model", model, "--tier", tier_name, "--num-requests", "6", "--repeat", "1")
    document = bench(capsys, *command, "--save", str(tmp_path / "b"))
    used = [row["used_share"] for row in document["sizes"]]
    assert [row["block_size"] for row in document["sizes"]] == [8, 16, 32]
    assert 1 > used[0] > used[1] > used[2] > document["contiguous"]["reserved_for_final_length"]
    assert (
        document["contiguous"]["reserved_for_final_length"]
        > document["contiguous"]["reserved_for_max_model_len"]
    )


def test_prefix_compares_a_hit_with_a_miss_of_the_same_length(
    tier_name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = bench(
        capsys, "prefix", "--model", model, "--tier", tier_name, "--lengths", "64", "200", "--repeat", "1",
        "--save", str(tmp_path / "p"),
    )  # fmt: skip
    assert [(row["prefix_tokens"], row["cached_tokens"]) for row in document["prefixes"]] == [
        (64, 64),
        (200, 192),
    ]


def test_startup_starts_a_process_for_each_run(
    tier_name: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = bench(capsys, "startup", "--model", model, "--tier", tier_name, "--repeat", "1")
    (row,) = document["tiers"].values()
    assert row["seconds"] > 0
    assert row["first_run_s"] > 0
    assert row["peak_memory_bytes"] >= 0


def test_roofline_has_the_promised_shape(
    tier_name: str,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = iter([Peaks(1e9, 1e10), Peaks(3e9, 1e10)])  # before and after
    monkeypatch.setattr(roofline, "measure_peaks", lambda: next(peaks))
    document = bench(
        capsys, "roofline", "--model", model, "--tier", tier_name, "--workload", "uniform", "--repeat", "1",
        "--save", str(tmp_path / "r"),
    )  # fmt: skip
    figures = document["workloads"]["uniform"]
    assert document["machine"]["read_bandwidth_bytes_per_s"] == figures["read_bandwidth_bytes_per_s"] == 3e9
    assert figures["share_of_floor"] == pytest.approx(figures["tokens_per_s"] / figures["floor_tokens_per_s"])
    assert 0 <= figures["memory_bound_share"] <= 1


def test_the_machine_reads_and_multiplies_at_some_rate() -> None:
    peaks = roofline.measure_peaks()
    assert 1e8 < peaks.bytes_per_s < 1e13
    assert 1e8 < peaks.operations_per_s < 1e15
    assert better(Peaks(1, 4), Peaks(3, 2)) == Peaks(3, 4)


def test_the_floor_by_hand() -> None:
    """One step of 64 tokens and 63 of one, in a model of two matrices."""
    config = EngineConfig(MODEL, CacheConfig(16, 100), SchedulerConfig(max_model_len=1024))
    weights = Weights(layer_bytes=1000, layer_numbers=500, head_bytes=300, head_numbers=200, row_bytes=2)
    steps = replay(load_tier("reference"), config, make_workload("uniform"))
    kv = MODEL.kv_bytes_per_token()
    pair = 4 * MODEL.head_dim * MODEL.num_attention_heads * MODEL.num_hidden_layers
    assert step_work(steps[0], weights, MODEL) == (
        1000 + 300 + 64 * 2 + (64 + 64) * kv,
        2 * (64 * 500 + 200) + 64 * 65 // 2 * pair,
    )
    assert step_work(replace(steps[0], num_rows=0), weights, MODEL)[0] == 1000 + 64 * 2 + 128 * kv
    floor = floor_of(steps, weights, config)
    work = [step_work(step, weights, MODEL) for step in steps]
    assert floor(Peaks(1.0, 1e30)) == pytest.approx((sum(b for b, _ in work),) * 2)
    assert floor(Peaks(1e30, 1.0)) == pytest.approx((sum(o for _, o in work), 0.0))
    figure = shares({"output_tokens": 64, "seconds": 4.0}, lambda peaks: (2.0, 1.0), Peaks(3, 5))
    assert figure == {
        "read_bandwidth_bytes_per_s": 3, "multiply_add_flops_per_s": 5,
        "floor_tokens_per_s": 32, "share_of_floor": 0.5, "memory_bound_share": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("tie", [True, False])
def test_weights_are_counted_in_the_type_that_a_tier_takes(tier: Tier, tmp_path: Path, tie: bool) -> None:
    path = make_tiny_llama(tmp_path, tie=tie)
    checkpoint = CountingCheckpoint(load_checkpoint(path))
    tier.make_model_runner(
        EngineArgs(model=str(path)).create_engine_config(checkpoint.config, "cpu"), checkpoint
    )
    weights = checkpoint.weights()
    matrices = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)  # q, k, v; o; gate, up, down
    assert weights.layer_numbers == matrices
    assert weights.layer_bytes == 4 * (matrices + 5 * 64)  # and five norms
    assert (weights.head_numbers, weights.head_bytes) == (320 * 64, 4 * 320 * 64)
    assert weights.row_bytes == 4 * 64


def test_learned_positions_are_read_by_the_row(tier: Tier, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "GPT2LMHeadModel")
    checkpoint = CountingCheckpoint(load_checkpoint(path))
    tier.make_model_runner(
        EngineArgs(model=str(path)).create_engine_config(checkpoint.config, "cpu"), checkpoint
    )
    weights = checkpoint.weights()
    assert weights.row_bytes == 2 * 4 * 64
    assert weights.head_numbers == 320 * 64
    assert weights.layer_numbers == 2 * (64 * 192 + 64 * 64 + 2 * 64 * 256)


def test_percentiles_by_nearest_rank() -> None:
    assert percentiles_ms([i / 1000 for i in range(1, 101)]) == pytest.approx(
        {"p50": 50, "p90": 90, "p99": 99}
    )
    assert percentiles_ms([]) == {"p50": 0, "p90": 0, "p99": 0}


def test_a_machine_without_a_list_of_processors_still_has_a_name(tmp_path: Path) -> None:
    assert results._cpu_name(tmp_path / "nothing")
    (tmp_path / "cpuinfo").write_text(
        "processor : 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: Quick: 9\n\n"
    )
    assert results._cpu_name(tmp_path / "cpuinfo") == "Quick: 9, family 26 model 2"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["throughput", "--repeat", "0"], "--repeat must be at least 1"),
        (["throughput", "--num-requests", "0"], "--num-requests must be at least 1"),
        (["throughput", "--workload", "colour"], "invalid choice"),
        (["throughput", "--workload", "long", "--max-model-len", "100"], "4096"),
        (["latency", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["seqs", "--limits", "0"], "--limits must be at least 1"),
        (["blocksize", "--sizes", "0"], "block_size must be at least 1"),
        (["prefix", "--lengths", "0"], "--lengths must be at least 1"),
        (["prefix", "--no-enable-prefix-caching"], "Without the prefix cache there is no hit to measure"),
        (["startup", "--repeat", "0"], "--repeat must be at least 1"),
        (["roofline", "--model", "nowhere"], "was not found"),
        ([], "the following arguments are required: BENCHMARK"),
    ],
)
def test_wrong_options_are_one_sentence(
    arguments: list[str], sentence: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [] if not arguments or "--model" in arguments else ["--model", model]
    assert main(["bench", *arguments, *named]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "throughput", "--model", model, "--save", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x.json").exists()
    assert "--save needs matplotlib: pip install 'twinfer[bench]'." in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["throughput", "peers", "roofline", "scheduler", "memory", "serve", "startup"]
)
def test_every_benchmark_has_a_help_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", name, "--help"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: twinfer bench {name}")


def test_the_probes_refuse_a_buffer_of_nothing_and_take_a_small_one() -> None:
    with pytest.raises(ValueError, match="num_bytes: expected at least 1, got 0"):
        kernels.read_bandwidth(0)
    assert kernels.read_bandwidth(1, seconds=0.0) > 0
    assert kernels.multiply_add_peak(seconds=0.0) > 0
