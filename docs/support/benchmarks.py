"""Tables of the page on performance, made from the records in `docs/benchmarks` while the site is built.

A record is what `twinfer bench NAME --save docs/benchmarks/DATE-NAME` wrote. The newest one of a benchmark is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fast.bench.kernels import improvements

RECORDS = Path(__file__).resolve().parents[1] / "benchmarks"
BUSY = 0.5  # load over cores, above which a machine was not quiet

Record = dict[str, Any]


def newest(benchmark: str, records: Path = RECORDS) -> Record | None:
    """The newest record of a benchmark; of two on one day, the one whose file sorts last."""
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(records.glob("*.json"))]
    own = [(record["date"], path.name, record) for path, record in found if record["benchmark"] == benchmark]
    return max(own, key=lambda entry: entry[:2])[2] if own else None


def benchmark_table(benchmark: str, records: Path = RECORDS) -> str:
    """The newest record of a benchmark as a Markdown table, with its day and machine."""
    record = newest(benchmark, records)
    if record is None:
        return f"*No record of `twinfer bench {benchmark}` yet.*\n"
    return f"{_TABLES[benchmark](record)}\n{provenance(record)}\n"


def provenance(record: Record) -> str:
    """Day, machine and how busy it was."""
    machine = record["machine"]
    load, cores = machine["load_before"], machine["cores"]
    where = f"{record['date']}, {cores} cores of {machine['cpu']}, load {load:.1f} when it began"
    if load <= BUSY * cores:
        return f"*{where}.*\n"
    return f"*{where}: **the machine was busy with other work**, so times say little; counts hold.*\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _throughput(record: Record) -> str:
    rows = [
        [
            f"`{name}`", str(w["requests"]), f"{w['prompt_tokens']:,}", f"{w['cached_tokens']:,}",
            f"{w['output_tokens']:,}", f"{w['tokens_per_s']:.0f}",
        ]
        for name, w in record["workloads"].items()
    ]  # fmt: skip
    return _table(["workload", "requests", "in", "of these cached", "out", "tokens/s"], rows)


def _roofline(record: Record) -> str:
    machine, weights = record["machine"], record["weights"]
    rows = [
        [
            f"`{name}`", f"{w['tokens_per_s']:.0f}", f"{w['read_bandwidth_bytes_per_s'] / 1e9:.1f}",
            f"{w['floor_tokens_per_s']:.0f}", f"{w['share_of_floor']:.0%}", f"{w['memory_bound_share']:.0%}",
        ]
        for name, w in record["workloads"].items()
    ]  # fmt: skip
    head = (
        f"{machine['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"{machine['multiply_add_flops_per_s'] / 1e9:.0f} GFLOP/s ({machine['isa']}), "
        f"{(weights['layer_bytes'] + weights['head_bytes']) / 1e6:.1f} MB of weights:\n\n"
    )
    table = _table(["workload", "tokens/s", "GB/s", "floor", "share", "of the floor, memory"], rows)
    return f"{head}{table}\n{_crossing(record)}"


def _crossing(record: Record) -> str:
    """From how many tokens a step on arithmetic takes longer than reading the weights."""
    machine, weights = record["machine"], record["weights"]
    reading = (weights["layer_bytes"] + weights["head_bytes"]) / machine["read_bandwidth_bytes_per_s"]
    token = 2 * weights["matrix_numbers"] / machine["multiply_add_flops_per_s"]
    return (
        f"On this machine reading the weights takes {1e3 * reading:.1f} ms, and one token's products take "
        f"{1e3 * token:.2f} ms: from {reading / token:.0f} tokens a step on, arithmetic is what a step waits for.\n"
    )


def _peers(record: Record) -> str:
    engines, workloads = record["engines"], list(record["workloads"])
    ours = engines["ours"]["tokens_per_s"]
    rows = []
    for name, engine in engines.items():
        rates = [engine["tokens_per_s"].get(workload) for workload in workloads]
        ratios = [
            "-"
            if rate is None
            else f"{rate:.0f}"
            if name == "ours"
            else f"{rate:.0f} ({ours[workload] / rate:.1f})"
            for workload, rate in zip(workloads, rates, strict=True)
        ]
        kept = engine.get("kept_beside_neighbour", {}).values()
        start, memory = engine["start_to_first_token_s"], engine["peak_memory_bytes"]
        rows.append([
            name, engine["weights"], *ratios, " ".join(f"{share:.0%}" for share in kept) or "-",
            "-" if start is None else f"{start:.1f} s", "-" if memory is None else f"{memory / 1e9:.2f} GB",
        ])  # fmt: skip
    headings = ["engine", "weights", *(f"`{name}`" for name in workloads), "kept", "first token", "memory"]
    notes = [
        f"- {name}: {engine['configuration']}; {', '.join(f'{p} {v}' for p, v in engine['versions'].items())}\n"
        for name, engine in engines.items()
        if "configuration" in engine
    ]
    notes += [f"- {name}: {engine['error']}.\n" for name, engine in engines.items() if engine["error"]]
    return f"{_table(headings, rows)}\n{''.join(notes)}\nMedians of {record['rounds']} rounds.\n"


def _latency(record: Record) -> str:
    rows = [[str(b["batch_size"]), *_percentiles(b)] for b in record["batches"]]
    return _table(["requests at once", *_TIMES], rows)


def _seqs(record: Record) -> str:
    rows = [
        [
            str(r["max_num_seqs"]), f"{r['tokens_per_s']:.0f}", f"{r['total_tokens_per_s']:.0f}",
            f"{r['step_ms']:.1f}", *_percentiles(r),
        ]
        for r in record["limits"]
    ]  # fmt: skip
    return _table(["`max_num_seqs`", "tokens/s", "with prompts", "ms a step", *_TIMES], rows)


_TIMES = ("time to first token, ms", "between tokens, ms", "whole answer, ms")


def _percentiles(row: Record) -> list[str]:
    return [f"{row[k]['p50']:,.0f} / {row[k]['p99']:,.0f}" for k in ("ttft_ms", "itl_ms", "e2e_ms")]


def _blocksize(record: Record) -> str:
    rows = [
        [f"{r['block_size']} tokens a block", f"{r['tokens_per_s']:.0f}", f"{1 - r['used_share']:.1%}"]
        for r in record["sizes"]
    ]
    contiguous = record["contiguous"]
    ways = {
        "reserved_for_final_length": "contiguous, by somebody who knows the final length",
        "reserved_for_max_model_len": "contiguous, room for the longest sequence",
    }
    rows += [[text, "", f"{1 - contiguous[name]:.1%}"] for name, text in ways.items()]
    return _table(["KV memory", "tokens/s", "wasted"], rows)


def _prefix(record: Record) -> str:
    rows = [
        [
            f"{r['prefix_tokens']:,}", f"{r['miss_ttft_ms']:.0f} ms", f"{r['hit_ttft_ms']:.1f} ms",
            f"{r['miss_ttft_ms'] / r['hit_ttft_ms']:.0f}",
        ]
        for r in record["prefixes"]
    ]  # fmt: skip
    return _table(["shared tokens", "miss", "hit", "miss / hit"], rows)


def _startup(record: Record) -> str:
    rows = [
        [name, f"{r['seconds']:.2f} s", f"{r['first_run_s']:.2f} s", f"{r['peak_memory_bytes'] / 1e6:.0f} MB"]
        for name, r in record["tiers"].items()
    ]
    return _table(["tier", "process start to first token", "first run", "peak memory"], rows)


def _serve(record: Record) -> str:
    rows = [
        [
            r["load"], f"{r['requests_per_second']:.2f}", f"{r['output_tokens_per_second']:.0f}", *_percentiles(r),
        ]
        for r in record["loads"]
    ]  # fmt: skip
    return _table(["load", "requests/s done", "tokens/s", *_TIMES], rows)


def _health(record: Record) -> str:
    rows = [
        [r["during"], str(r["asked"]), *(f"{r['ms'][name]:.1f} ms" for name in ("p50", "p99", "max"))]
        for r in record["disturbances"]
    ]
    return _table(["while the server gets", "asked", "p50", "p99", "longest"], rows)


def _kernels(record: Record) -> str:
    """Of a record of the emulator, the figure that each rung claims; of a device, times."""
    if record["device"] != "simt":
        timed = [
            [f"`{row['operation']}` `{row['rung']}`", f"{row['median_us']:,.1f}", f"{row['gb_per_s']:,.1f}"]
            for row in record["rungs"]
        ]
        return _table(["rung", "median us", "GB/s"], timed)
    rows = [
        [
            f"`{row['operation']}` `{row['rung']}`", row["claim"].replace("_", " "), f"{before[row['claim']]:,}",
            f"{row[row['claim']]:,}", f"{row[row['claim']] / before[row['claim']]:.1%}",
        ]
        for before, row in improvements(record["rungs"])
    ]  # fmt: skip
    return _table(["rung", "is there for", "rung before", "this rung", "share"], rows)


_TABLES: dict[str, Callable[[Record], str]] = {
    "blocksize": _blocksize,
    "health": _health,
    "kernels": _kernels,
    "latency": _latency,
    "peers": _peers,
    "prefix": _prefix,
    "roofline": _roofline,
    "seqs": _seqs,
    "serve": _serve,
    "startup": _startup,
    "throughput": _throughput,
}
