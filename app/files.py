"""A run as a file: a trace file with one entry more, for the texts, the options and the requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.runs import Change, RequestInfo, Run, RunInfo
from reference.contracts.trace import StepTrace
from reference.frontend.trace_file import read_trace, write_trace
from reference.frontend.workload import Workload, parse_workload


def save_run(run: Run, path: Path) -> None:
    """Write a trace file with one entry more, `run`, that other readers of traces pass over."""
    write_trace(run.traces, path)
    document = json.loads(path.read_text(encoding="ascii"))
    info = run.info
    document["run"] = {
        "title": info.title, "tier": info.tier, "model": info.model, "block_size": info.block_size,
        "options": dict(info.options), "is_static": info.is_static,
        "num_blocks": info.num_blocks, "changes": [[c.step, dict(c.options)] for c in info.changes],
        "pieces": [[token_id, text] for token_id, text in info.pieces.items()],
        "requests": [
            [r.request_id, r.prompt_token_ids, r.arrival, r.priority, r.candidates] for r in info.requests
        ],
    }  # fmt: skip
    if run.workload is not None:
        document["run"]["workload"] = [request.to_json() for request in run.workload.requests]
    path.write_text(json.dumps(document, separators=(",", ":")), encoding="ascii")


def load_run(path: Path) -> Run:
    """Read what `save_run` or `twinfer trace --out` wrote.

    Raises:
        ValueError: the file cannot be read, is no trace, or is damaged.
    """
    traces = read_trace(path)
    if not traces:
        raise ValueError(f"{path.name} holds no step.")
    table = json.loads(path.read_text(encoding="utf-8")).get("run")
    if table is None:
        return Run(RunInfo(path.stem, "?", "?", infer_block_size(traces)), traces)
    try:
        info = _parse_info(table)
        return Run(info, traces, workload=_parse_workload(table.get("workload"), info))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path.name} has a damaged description of its run; record it again.") from error


def _parse_info(table: Any) -> RunInfo:
    block_size = int(table["block_size"])
    if block_size < 1:
        raise ValueError(block_size)
    requests = [
        RequestInfo(
            str(name),
            tuple(map(int, prompt)),
            int(arrival),
            int(priority),
            tuple(tuple((str(text), float(p)) for text, p in entry) for entry in candidates),
        )
        for name, prompt, arrival, priority, candidates in table["requests"]
    ]
    return RunInfo(
        title=str(table["title"]),
        tier=str(table["tier"]),
        model=str(table["model"]),
        block_size=block_size,
        requests=tuple(requests),
        pieces={int(token_id): str(text) for token_id, text in table["pieces"]},
        options=dict(table["options"]),
        is_static=bool(table["is_static"]),
        num_blocks=int(table.get("num_blocks", 0)),
        changes=tuple(Change(int(step), dict(options)) for step, options in table.get("changes", ())),
    )


def _parse_workload(lines: Any, info: RunInfo) -> Workload | None:
    """Without it (older files) a run can be shown, but not done again."""
    if lines is None:
        return None
    requests = parse_workload(json.dumps(line) for line in lines).requests
    return Workload(requests, dict(info.options))


def infer_block_size(traces: Sequence[StepTrace]) -> int:
    """Tokens a block holds, from a trace that does not say it: exact as soon as one table was ever full.

    A table of k blocks that covers c computed tokens means at least c / k tokens a block.
    """
    sizes = (
        -(-trace.state.num_computed_tokens.get(name, 0) // len(table))
        for trace in traces
        for name, table in trace.state.cache.block_tables.items()
        if table
    )
    return max(sizes, default=1) or 1
