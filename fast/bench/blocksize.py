"""`twinfer bench blocksize`: what the block size costs and wastes, and what contiguous memory would waste instead.

Speed is measured; waste is counted, step by step, on the real scheduler (`fast.bench.replay`). The last block of a
sequence is partly empty: that is all that paging can waste. Contiguous memory must be reserved before a request starts:
for the longest sequence there can be, or, by somebody who knows the future, for the length it will have. (After Kwon et
al., SOSP 2023, section 6.2 and figure 2.)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from fast.bench.engines import add_run_options, check_run_options, engine_args, median, workload_of
from fast.bench.plots import bars
from fast.bench.replay import Step, replay
from fast.bench.results import Document, make_document, print_table, report
from fast.bench.runner import make_engine, run_workload
from reference.frontend.tiers import pick_tier

SIZES = (8, 16, 32)


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES), metavar="N",
        help=f"tokens a block holds (default: {' '.join(map(str, SIZES))})",
    )  # fmt: skip
    add_run_options(parser, tier)


def run(arguments: argparse.Namespace) -> int:
    check_run_options(arguments)
    tier = pick_tier(arguments.tier)
    rows, contiguous = [], {}
    for size in arguments.sizes:
        engine = make_engine(engine_args(arguments, block_size=size), tier)
        workload = workload_of(arguments, "mixed", engine.config.model.vocab_size)
        runs = [run_workload(engine, workload) for _ in range(arguments.repeat)]
        steps = replay(tier, engine.config, workload)
        rows.append(
            {
                "block_size": size,
                "tokens_per_s": median([run.tokens_per_s for run in runs]),
                "peak_blocks": max(step.num_held_slots for step in steps) // size,
                "used_share": used_share(steps),
            }
        )
        contiguous = contiguous_shares(steps, engine.config.scheduler.max_model_len)
    document = make_document("blocksize", tier=tier.name, workload="mixed", sizes=rows, contiguous=contiguous)
    report(arguments, document, lambda: _print(document), lambda figure: _draw(document, figure))
    return 0


def used_share(steps: Sequence[Step]) -> float:
    """Slots that hold a token, of all slots of held blocks, over all steps."""
    return sum(s.num_held_tokens for s in steps) / sum(s.num_held_slots for s in steps)


def contiguous_shares(steps: Sequence[Step], max_model_len: int) -> dict[str, float]:
    """The same for contiguous memory, with the same requests running in the same steps."""
    used = sum(step.num_running_tokens for step in steps)
    return {
        "reserved_for_max_model_len": used / sum(step.num_running * max_model_len for step in steps),
        "reserved_for_final_length": used / sum(step.num_final_tokens for step in steps),
    }


def _print(document: Document) -> None:
    rows = [
        [
            f"paged, {r['block_size']} tokens a block", f"{r['tokens_per_s']:.1f}", f"{r['peak_blocks']:,}",
            *_shares(r["used_share"]),
        ]
        for r in document["sizes"]
    ]  # fmt: skip
    names = {
        "reserved_for_final_length": "contiguous, final length known",
        "reserved_for_max_model_len": "contiguous, longest sequence reserved",
    }
    rows += [[text, "", "", *_shares(document["contiguous"][name])] for name, text in names.items()]
    print_table(
        f"KV memory of the workload mixed, {document['tier']} tier",
        ["way", "tokens/s", "peak blocks", "in use", "wasted"],
        rows,
    )


def _shares(used: float) -> list[str]:
    return [f"{used:.1%}", f"{1 - used:.1%}"]


def _draw(document: Document, figure: Any) -> None:
    speed, use = figure.subplots(1, 2)
    sizes = document["sizes"]
    labels = [f"{r['block_size']} a block" for r in sizes]
    bars(speed, "Speed", labels, [r["tokens_per_s"] for r in sizes], "generated tokens/s")
    shares = [r["used_share"] for r in sizes] + list(document["contiguous"].values())
    names = [*labels, "contiguous,\nlongest reserved", "contiguous,\nfinal length known"]
    bars(use, "Slots that hold a token", names, [100 * share for share in shares], "%")
