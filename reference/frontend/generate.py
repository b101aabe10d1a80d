"""`twinfer generate`: run prompts and print what came out, for people or for programs."""

from __future__ import annotations

import json
import sys
import time

from rich.console import Console
from rich.text import Text
from tqdm.auto import tqdm

from reference.contracts.protocols import Tier
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.workload import Workload, WorkloadRun


def generate(tier: Tier, args: EngineArgs, workload: Workload, as_json: bool) -> int:
    """Run a workload and print its outputs in the order of the requests.

    Returns:
        Exit status: 0, or 1 when a request ended with an error.

    Raises:
        ValueError: the model cannot be loaded, or a request is not acceptable.
    """
    engine = LLMEngine.from_engine_args(args, tier)
    run = WorkloadRun(engine, workload)
    started = time.perf_counter()
    total = len(workload.requests)
    with tqdm(total=total, desc="Generating", unit="prompt", disable=None, leave=False) as bar:
        while not run.is_done:
            bar.update(sum(output.finished for output in run.step()))
    seconds = time.perf_counter() - started
    outputs = [run.finished[request.request_id] for request in workload.requests]
    for output in outputs:
        if as_json:
            print(to_json_line(output))
        else:
            _print_output(output)
    if not as_json:
        _print_statistics(tier.name, outputs, seconds)
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        print(f"twinfer: request {output.request_id} failed: {output.error}", file=sys.stderr)
    return 1 if failed else 0


def to_json_line(output: RequestOutput) -> str:
    """One output as a JSON object on one line: the machine-readable form."""
    outputs = [
        {
            "index": completion.index,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "logprobs": None,
        }
        for completion in output.outputs
    ]
    line = {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": outputs,
        "metrics": vars(output.metrics),
    }
    return json.dumps(line, ensure_ascii=False)


def _print_output(output: RequestOutput) -> None:
    """Prompt in dim, answer after it. `Text` and no markup: a model may write square brackets."""
    text = Text(output.prompt or "", style="dim")
    text.append(output.outputs[0].text, style="not dim")
    Console(highlight=False, soft_wrap=True).print(text)


def _print_statistics(tier_name: str, outputs: list[RequestOutput], seconds: float) -> None:
    generated = sum(output.metrics.num_output_tokens for output in outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    print(
        f"{tier_name}: {generated} tokens in {seconds:.2f} s ({generated / max(seconds, 1e-9):.1f} tokens/s), "
        f"{cached} prompt tokens from the prefix cache",
        file=sys.stderr,
    )
