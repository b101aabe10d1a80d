"""`make demo`: one workload, two engines, the same tokens.

Four chat prompts share a system prompt. The first arrives alone and fills the prefix cache; the others come together
and find its blocks. Both tiers generate, then everything they decided is laid side by side.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm.auto import tqdm

from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.trace import StepTrace
from reference.frontend.engine_args import DEFAULT_MODEL, EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, WorkloadRun

SYSTEM = (
    "You are a careful assistant. Answer every question with one short, true sentence, in plain English, without any "
    "introduction and without repeating the question."
)
QUESTIONS = (
    "What is the capital of France?",
    "What is the largest planet in the Solar System?",
    "Which animal says meow?",
    "What is the chemical formula of water?",
)
TIERS = ("reference", "fast")
# Small enough that blocks, budget and preemption can be followed by eye.
OPTIONS = {
    "block_size": 16,
    "num_blocks": 25,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "trace": True,
}


@dataclass
class TierRun:
    """What one tier did with the workload."""

    tier: Tier
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
        return next(table[request_id] for table in reversed(tables) if request_id in table)

    def decisions(self) -> list[tuple[object, ...]]:
        """Every step without its duration: what must be equal in both tiers."""
        return [
            (
                trace.num_scheduled_tokens,
                trace.preempted,
                trace.state,
                trace.sampled_token_ids,
                trace.finished,
            )
            for trace in self.traces
        ]


def make_workload() -> Workload:
    params = SamplingParams(temperature=0, max_tokens=32)
    requests = []
    for number, question in enumerate(QUESTIONS):
        messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question})
        arrival_step = 0 if number == 0 else 2
        requests.append(
            WorkloadRequest(f"r{number}", messages=messages, arrival_step=arrival_step, params=params)
        )
    return Workload(tuple(requests))


def run_tier(name: str, workload: Workload) -> TierRun:
    tier = load_tier(name)
    engine = LLMEngine.from_engine_args(EngineArgs(model=DEFAULT_MODEL, **OPTIONS), tier)  # type: ignore[arg-type]
    # The first product with each matrix maps its weights into memory; that is loading, not generating.
    warm_up = Workload((WorkloadRequest("warm-up", prompt="Hello", params=SamplingParams(max_tokens=2)),))
    warming = WorkloadRun(engine, warm_up)
    while not warming.is_done:
        warming.step()
    engine.engine_core.traces.clear()
    run = WorkloadRun(engine, workload)
    started = time.perf_counter()
    with tqdm(
        total=len(workload.requests), desc=f"{name:9}", unit="prompt", disable=None, leave=False
    ) as bar:
        while not run.is_done:
            bar.update(sum(output.finished for output in run.step()))
    return TierRun(tier, run.finished, list(engine.engine_core.traces), time.perf_counter() - started)


def print_run(console: Console, runs: list[TierRun]) -> bool:
    """One block a prompt, then one line a tier. True when everything is equal."""
    all_equal = True
    for number, question in enumerate(QUESTIONS):
        request_id = f"r{number}"
        outputs = [run.outputs[request_id] for run in runs]
        tables = [run.block_table(request_id) for run in runs]
        equal = outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids and tables[0] == tables[1]
        all_equal &= equal
        answer, metrics = outputs[0].outputs[0], outputs[0].metrics
        console.print(Text(question, style="bold"))
        console.print(Text(f"  {answer.text.strip()}", style="green"))
        for text in (
            f"token ids      {'equal on both tiers' if equal else 'DIFFERENT'}: {' '.join(map(str, answer.token_ids))}",
            f"block table    {' '.join(map(str, tables[0]))}",
            f"prompt tokens  {metrics.num_prompt_tokens}, of which {metrics.num_cached_tokens} from the prefix cache",
        ):
            console.print(Text(f"  {text}", style="dim" if equal else "red"))
        console.print()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("tier", "steps", "preemptions", "tokens", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "tier" else "right")
    for run in runs:
        counts = (len(run.traces), run.num_preemptions, run.num_tokens)
        table.add_row(run.tier.name, *map(str, counts), f"{run.num_tokens / run.seconds:.1f}")
    console.print(table)
    return all_equal and runs[0].decisions() == runs[1].decisions()


def main() -> int:
    """Returns the exit status: 0 when both tiers agree in everything, 1 when not, 2 when they could not run."""
    os.environ.setdefault("TWINFER_LOGGING_LEVEL", "WARNING")
    console = Console(highlight=False, soft_wrap=True)
    try:
        runs = [run_tier(name, make_workload()) for name in TIERS]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if print_run(console, runs):
        console.print(
            "Both tiers gave the same tokens, block tables and schedule, step for step.", style="bold green"
        )
        return 0
    console.print("The tiers differ: run `twinfer diff` on the workload to see where.", style="bold red")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
