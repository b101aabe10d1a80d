"""`make demo`: one workload, two engines, the same tokens.

Four chat prompts share a system prompt. The first arrives alone and fills the prefix cache; the others come together
and find its blocks. Both tiers generate, then everything they decided is laid side by side.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tqdm.auto import tqdm

from reference.contracts.sampling_params import SamplingParams
from reference.contracts.trace import StepTrace
from reference.frontend.engine_args import DEFAULT_MODEL, EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.logger import LEVEL_VARIABLE
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, WorkloadRun, run_workload

SYSTEM = (
    "You are a careful assistant. Answer every question with one short, true sentence, in plain English, without any "
    "introduction and without repeating the question."
)
QUESTIONS = (
    "What is the capital of France?",
    "What is the largest planet in the Solar System?",
    "What do bees make?",
    "What is the chemical formula of water?",
)
TIERS = ("reference", "fast")
# Small enough that the block tables and the steps can be followed by eye.
OPTIONS: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 25,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
}


@dataclass(frozen=True)
class TierRun:
    """What one tier did with the workload."""

    name: str
    outputs: dict[str, RequestOutput]
    traces: list[StepTrace]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(output.metrics.num_output_tokens for output in self.outputs.values())

    @property
    def num_preemptions(self) -> int:
        return sum(len(trace.preempted) for trace in self.traces)

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The request's table in the last step that had it running."""
        tables = [trace.state.cache.block_tables for trace in self.traces]
        return next((table[request_id] for table in reversed(tables) if request_id in table), ())

    def decisions(self) -> list[dict[str, Any]]:
        """Every step without its duration: what must be equal in both tiers."""
        return [{**vars(trace), "started": None, "seconds": None} for trace in self.traces]


def make_workload() -> Workload:
    """Greedy, so that whoever runs this sees the same answers."""
    params = SamplingParams(temperature=0, max_tokens=32)
    requests = []
    for number, question in enumerate(QUESTIONS):
        messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question})
        arrival_step = 0 if number == 0 else 2
        requests.append(
            WorkloadRequest(f"r{number}", messages=messages, arrival_step=arrival_step, params=params)
        )
    return Workload(tuple(requests))


def run_tier(name: str, workload: Workload, model: str = DEFAULT_MODEL) -> TierRun:
    """Load a tier and let it play the workload.

    Raises:
        ValueError: the tier cannot run here, or the model cannot be loaded.
    """
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, trace=True, **OPTIONS), load_tier(name))
    # The first product with each matrix maps its weights into memory; that is loading, not generating.
    warm_up = WorkloadRequest("warm-up", prompt="Hello", params=SamplingParams(max_tokens=2))
    run_workload(engine, Workload((warm_up,)))
    engine.engine_core.traces.clear()
    run = WorkloadRun(engine, workload)
    started = time.perf_counter()
    with tqdm(
        total=len(workload.requests), desc=f"{name:9}", unit="prompt", disable=None, leave=False
    ) as bar:
        while not run.is_done:
            bar.update(sum(output.finished for output in run.step()))
    return TierRun(name, run.finished, engine.engine_core.traces, time.perf_counter() - started)


def print_comparison(console: Console, runs: tuple[TierRun, TierRun]) -> bool:
    """A panel a prompt, a line a tier, and the verdict. True when both tiers decided the same in every step."""
    for number, question in enumerate(QUESTIONS):
        console.print(_prompt_panel(f"r{number}", question, runs))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("tier", "steps", "preemptions", "tokens", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "tier" else "right")
    for run in runs:
        counts = (len(run.traces), run.num_preemptions, run.num_tokens)
        table.add_row(run.name, *map(str, counts), f"{run.num_tokens / run.seconds:.1f}")
    console.print(table)
    same_tokens = all(_token_ids(runs[0], name) == _token_ids(runs[1], name) for name in runs[0].outputs)
    equal = same_tokens and runs[0].decisions() == runs[1].decisions()
    if equal:
        verdict = "All tokens are equal, and so are all block tables and schedules, step for step."
    else:
        verdict = "The tiers differ; `twinfer diff` on a workload file shows where."
    console.print(verdict, style="bold green" if equal else "bold red")
    return equal


def _prompt_panel(request_id: str, question: str, runs: tuple[TierRun, TierRun]) -> Panel:
    first = runs[0].outputs[request_id]
    token_ids, other_token_ids = (_token_ids(run, request_id) for run in runs)
    tables = [run.block_table(request_id) for run in runs]
    num_shared = first.num_cached_tokens // OPTIONS["block_size"]
    rows = Table.grid(padding=(0, 2))
    rows.add_row("token ids", _ids(token_ids))
    if token_ids == other_token_ids:
        rows.add_row("", Text("equal on both tiers", style="green"))
    else:
        rows.add_row(runs[1].name, Text.assemble(_ids(other_token_ids), ("  DIFFERENT", "bold red")))
    rows.add_row("block table", _ids(tables[0], num_shared))
    if tables[0] != tables[1]:
        rows.add_row(runs[1].name, Text.assemble(_ids(tables[1]), ("  DIFFERENT", "bold red")))
    origin = f" (blocks {_ids(tables[0][:num_shared])})" if num_shared else ""
    rows.add_row(
        "cached", f"{first.num_cached_tokens} of {first.metrics.num_prompt_tokens} prompt tokens{origin}"
    )
    answer = Text(f"{first.outputs[0].text.strip()}\n", style="bold")
    return Panel(Group(answer, rows), title=Text(question), title_align="left", box=box.ROUNDED)


def _token_ids(run: TierRun, request_id: str) -> list[int]:
    return run.outputs[request_id].outputs[0].token_ids


def _ids(values: list[int] | tuple[int, ...], num_highlighted: int = 0) -> Text:
    text = Text(" ".join(map(str, values)))
    text.stylize("cyan", 0, len(" ".join(map(str, values[:num_highlighted]))))
    return text


def main() -> int:
    """Returns the exit status: 0 when both tiers agree in everything, 1 when not, 2 when they cannot run here."""
    os.environ.setdefault(LEVEL_VARIABLE, "WARNING")
    workload = make_workload()
    try:
        runs = (run_tier(TIERS[0], workload), run_tier(TIERS[1], workload))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    console = Console(highlight=False)
    return 0 if print_comparison(console, runs) else 1


if __name__ == "__main__":
    raise SystemExit(main())
