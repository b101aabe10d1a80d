"""The page on performance shows the newest records, and says when a machine was busy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs.support.benchmarks import _TABLES, RECORDS, benchmark_table, newest, provenance
from fast.bench.options import BENCHMARKS

MACHINE: dict[str, Any] = {"cpu": "Some CPU", "cores": 2, "load_before": 0.1}


def write(folder: Path, name: str, date: str, **figures: Any) -> None:
    record = {"benchmark": "startup", "date": date, "machine": MACHINE, **figures}
    (folder / f"{name}.json").write_text(json.dumps(record))


def test_a_new_record_changes_the_table(tmp_path: Path) -> None:
    def tiers(seconds: float) -> dict[str, Any]:
        return {"fast": {"seconds": seconds, "first_run_s": 2.0, "peak_memory_bytes": 440e6}}

    assert "No record of `twinfer bench startup` yet" in benchmark_table("startup", tmp_path)
    write(tmp_path, "b", "2026-01-02", tiers=tiers(1.25))
    write(tmp_path, "a", "2026-01-01", tiers=tiers(9.0))
    table = benchmark_table("startup", tmp_path)
    assert "| fast | 1.25 s | 2.00 s | 440 MB |" in table
    assert "2026-01-02, 2 cores of Some CPU" in table
    write(tmp_path, "a", "2026-01-03", tiers=tiers(7.5))
    assert "7.50 s" in benchmark_table("startup", tmp_path)


def test_a_busy_machine_is_called_busy() -> None:
    quiet = {"date": "2026-01-02", "machine": MACHINE}
    assert "busy" not in provenance(quiet)
    assert "busy with other work" in provenance({**quiet, "machine": MACHINE | {"load_before": 1.2}})


def test_the_crossing_from_memory_to_arithmetic_by_hand(tmp_path: Path) -> None:
    """100 MB at 10 GB/s take 10 ms; 200 million operations at 100 GFLOP/s take 2 ms."""
    machine = MACHINE | {"read_bandwidth_bytes_per_s": 10e9, "multiply_add_flops_per_s": 100e9, "isa": "avx2"}
    weights = {"layer_bytes": 60e6, "head_bytes": 40e6, "matrix_numbers": 100e6}
    record = {
        "benchmark": "roofline",
        "date": "2026-01-02",
        "machine": machine,
        "weights": weights,
        "workloads": {},
    }
    (tmp_path / "r.json").write_text(json.dumps(record))
    table = benchmark_table("roofline", tmp_path)
    assert "takes 10.0 ms, and one token's products take 2.00 ms: from 5 tokens a step on" in table


def test_every_benchmark_that_saves_a_record_has_a_table() -> None:
    assert set(_TABLES) == {benchmark.name for benchmark in BENCHMARKS if benchmark.has_output_options}


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.name)
def test_every_committed_record_can_be_shown_and_names_no_host(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    assert path.stem == f"{record['date']}-{record['benchmark']}"
    assert newest(record["benchmark"]) is not None
    assert record["date"] in benchmark_table(record["benchmark"])
    assert set(record["machine"]) <= {
        "cpu", "cores", "isa", "load_before", "multiply_add_flops_per_s", "read_bandwidth_bytes_per_s", "system",
    }  # fmt: skip
