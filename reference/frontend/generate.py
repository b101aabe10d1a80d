"""`twinfer generate`: run prompts and print what came out, for people or for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from tqdm.auto import tqdm

from reference.contracts.protocols import Tier
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import Logprob, RequestOutput
from reference.frontend.workload import Workload, WorkloadRequest, WorkloadRun


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
    with tqdm(
        total=len(workload.requests), desc="Generating", unit="prompt", disable=None, leave=False
    ) as bar:
        while not run.is_done:
            bar.update(sum(output.finished for output in run.step()))
    seconds = time.perf_counter() - started
    outputs = [run.finished[request.request_id] for request in workload.requests]
    if as_json:
        for output in outputs:
            print(to_json_line(output))
    else:
        _print_texts(workload.requests, outputs)
        sys.stdout.flush()  # before the statistics, where both streams go to one place
        print(_statistics(tier.name, outputs, seconds), file=sys.stderr)
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        print(f"twinfer: request {output.request_id!r} failed: {output.error}", file=sys.stderr)
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
            "logprobs": _as_lists(completion.logprobs),
        }
        for completion in output.outputs
    ]
    line = {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": _as_lists(output.prompt_logprobs),
        "outputs": outputs,
        "metrics": vars(output.metrics),
    }
    return json.dumps(line, ensure_ascii=False)


def _as_lists(
    tables: Sequence[dict[int, Logprob] | None] | None,
) -> list[list[dict[str, object]] | None] | None:
    """One list a token: the token itself first, then by rank; null for the first token of a prompt."""
    if tables is None:
        return None
    return [
        None
        if table is None
        else [{"token_id": token_id, **vars(logprob)} for token_id, logprob in table.items()]
        for table in tables
    ]


def _print_texts(requests: Sequence[WorkloadRequest], outputs: Sequence[RequestOutput]) -> None:
    """Each prompt in dim and what follows it, an empty line between two.

    Built of `Text` and without markup: a model may write square brackets.
    """
    console = Console(highlight=False, soft_wrap=True)
    for number, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        if number:
            console.print()
        for completion in output.outputs:
            text = Text(_shown_prompt(request), style="dim")
            text.append(completion.text, style="not dim")
            console.print(text)


def _shown_prompt(request: WorkloadRequest) -> str:
    """What the user wrote: of a conversation the last message, without the template's markup."""
    if request.messages is not None:
        return f"{request.messages[-1]['content']}\n"
    return request.prompt or ""


def _statistics(tier_name: str, outputs: Sequence[RequestOutput], seconds: float) -> str:
    generated = sum(output.metrics.num_output_tokens for output in outputs)
    prompt = sum(output.metrics.num_prompt_tokens for output in outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return (
        f"{tier_name}: {generated} tokens in {seconds:.2f} s ({generated / max(seconds, 1e-9):.1f} tokens/s), "
        f"{cached} of {prompt} prompt tokens from the prefix cache"
    )
