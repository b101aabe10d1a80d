"""The `twinfer` program. Every mistake of a user is one sentence on stderr and exit status 2, never a traceback."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reference.contracts.sampling_params import SamplingParams
from reference.contracts.structured_outputs import StructuredOutputsParams
from reference.frontend.cli_options import (
    ENGINE,
    SAMPLING,
    STRUCTURED,
    Command,
    command_entry,
    given,
    make_parser,
)
from reference.frontend.tiers import load_tier, pick_tier

if TYPE_CHECKING:
    from reference.frontend.workload import Workload


def main(argv: Sequence[str] | None = None, tier: str | None = None) -> int:
    """Run the program.

    Args:
        argv: arguments, those of the process unless given.
        tier: the tier to use when `--tier` is not given.

    Returns:
        Exit status: 0, 1 when a comparison found a difference or a request failed, 2 on bad input, 130 on Ctrl-C.

    Raises:
        SystemExit: after `--help` and `--version`, as argparse does it.
    """
    if argv is None:  # this process is ours
        # Imports make half a million objects that stay. The collector would walk them several times in a short run.
        gc.set_threshold(50_000, 20, 100)
    try:
        arguments = make_parser(_COMMANDS, tier).parse_args(argv)
        # BLAS threads that wait by spinning slow down beside any other load: on two cores with a neighbour burning one,
        # the reference tier made 20 tokens/s, and 33 with this; 50 instead of 55 on a quiet machine.
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
        if arguments.threads is not None:
            _set_threads(arguments.threads)
        status: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where a reader that has gone is expected
    except BrokenPipeError:
        # head or less has what it wanted. Python would complain when it flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except MemoryError as error:
        return _refuse(f"there is not enough memory ({error}); lower --kv-cache-memory or --num-blocks.")
    except (ValueError, OSError) as error:
        return _refuse(str(error))
    return status


def _refuse(sentence: str) -> int:
    print(f"twinfer: {' '.join(sentence.split())}", file=sys.stderr)
    return 2


def _set_threads(threads: int) -> None:
    """BLAS and OpenMP read these when they are first loaded, which is after the arguments are parsed."""
    if threads < 1:
        raise ValueError(f"--threads must be at least 1, got {threads}.")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)


def _generate(arguments: argparse.Namespace) -> int:
    from reference.frontend.engine_args import EngineArgs
    from reference.frontend.generate import generate

    workload = _workload(arguments)
    args = EngineArgs(**{**workload.config, **given(arguments, ENGINE)})
    return generate(pick_tier(arguments.tier), args, workload, as_json=arguments.json)


def _workload(arguments: argparse.Namespace) -> Workload:
    """The prompts as a workload. What is said on the command line holds for all of them, those of a file too."""
    from reference.frontend.workload import Workload, WorkloadRequest, read_workload

    texts = arguments.prompts
    if arguments.input is not None:
        if texts:
            raise ValueError("Give prompts either as arguments or with --input, not both.")
        workload = read_workload(arguments.input)
    else:
        texts = texts or _read_prompts()
        workload = Workload(tuple(WorkloadRequest(str(i), prompt=text) for i, text in enumerate(texts)))
    options = _sampling_options(arguments)
    requests = [replace(r, params=replace(r.params, **options)) for r in workload.requests]
    if arguments.chat:
        requests = [_as_chat(request) for request in requests]
    return Workload(tuple(requests), workload.config)


def _read_prompts() -> list[str]:
    """One prompt a line from standard input, empty lines left out."""
    if sys.stdin.isatty():
        raise ValueError("No prompt: give one as an argument, with --prompt or --input, or pipe lines in.")
    try:
        texts = [line.rstrip("\n") for line in sys.stdin]
    except UnicodeDecodeError as error:
        raise ValueError(f"Standard input is no {error.encoding} text.") from error
    texts = [text for text in texts if text]
    if not texts:
        raise ValueError("No prompt: standard input is empty.")
    return texts


def _as_chat(request: Any) -> Any:
    if request.prompt_token_ids is not None:
        raise ValueError(
            f"Request {request.request_id!r} has token ids, which --chat cannot wrap; give text."
        )
    if request.messages is not None:
        return request
    return replace(request, prompt=None, messages=({"role": "user", "content": request.prompt},))


def _sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    options = given(arguments, SAMPLING)
    if "sampling_seed" in options:  # --seed is the engine's, as in vLLM
        options["seed"] = options.pop("sampling_seed")
    structured = given(arguments, STRUCTURED)
    if structured:
        if "json_schema" in structured:  # --json is the form of the output
            structured["json"] = structured.pop("json_schema")
        options["structured_outputs"] = StructuredOutputsParams(**structured)
    return options


def _chat(arguments: argparse.Namespace) -> int:
    from reference.frontend.chat_loop import ChatLoop
    from reference.frontend.engine_args import EngineArgs
    from reference.frontend.llm_engine import LLMEngine

    params = replace(_CHAT_SAMPLING, **_sampling_options(arguments))
    args = EngineArgs(**given(arguments, ENGINE))
    engine = LLMEngine.from_engine_args(args, pick_tier(arguments.tier))
    engine.log_stats = False  # a line of the log would land in the middle of an answer
    return ChatLoop(engine, params, arguments.system).run()


def _serve(arguments: argparse.Namespace) -> int:
    from reference.frontend.engine_args import EngineArgs
    from reference.frontend.server.options import server_args

    try:
        from reference.frontend.server.serve import serve
    except ImportError as error:
        raise ValueError(
            f"The server needs packages that are not installed ({error}): pip install 'twinfer[server]'."
        ) from error
    args = EngineArgs(**given(arguments, ENGINE))
    return serve(args, server_args(arguments), pick_tier(arguments.tier))


def _diff(arguments: argparse.Namespace) -> int:
    from reference.frontend.diff import compare_tiers
    from reference.frontend.engine_args import DEFAULT_MODEL
    from reference.frontend.report import print_diff
    from reference.frontend.workload import read_workload

    workload = read_workload(arguments.workload)
    options = {"model": DEFAULT_MODEL, **workload.config, **given(arguments, ENGINE)}
    report = compare_tiers((load_tier("reference"), load_tier("fast")), workload=workload, **options)
    print_diff(report)
    return 0 if report.is_equal else 1


def _trace(arguments: argparse.Namespace) -> int:
    from reference.frontend.engine_args import EngineArgs
    from reference.frontend.trace_run import trace_workload
    from reference.frontend.workload import read_workload

    workload = read_workload(arguments.workload)
    args = EngineArgs(**{**workload.config, **given(arguments, ENGINE)})
    return trace_workload(pick_tier(arguments.tier), args, workload, arguments.out, arguments.chrome)


def _conform(arguments: argparse.Namespace) -> int:
    from reference.frontend.conform import replay_recording

    report = replay_recording(arguments.recording, pick_tier(arguments.tier))
    if report.first_difference is not None:
        print(report.first_difference)
    print(report.summary())
    return 0 if report.is_equal else 1


def _model(arguments: argparse.Namespace) -> int:
    from reference.frontend.checkpoint import load_checkpoint
    from reference.frontend.model_store import resolve_model

    path = resolve_model(arguments.model)
    load_checkpoint(path)
    print(f"{arguments.model} is ready: {path}")
    return 0


def _app(arguments: argparse.Namespace) -> int:
    status: int = command_entry("app")(arguments.host, arguments.port, arguments.watch_remote)
    return status


def _bench(arguments: argparse.Namespace) -> int:
    status: int = arguments.benchmark(arguments)
    return status


# Small models wander off at temperature 1; these are the values the embedded model's authors recommend.
_CHAT_SAMPLING = SamplingParams(temperature=0.2, top_p=0.9, max_tokens=512)


def _learn(arguments: argparse.Namespace) -> int:
    from reference.frontend.learn import learn

    return learn(arguments.exercise, given(arguments, ("hint",)).get("hint", 0))


_COMMANDS = (
    Command(
        "generate",
        "generate text for prompts from arguments, a file or standard input",
        _generate,
        options=("prompts", "tier", "sampling", "engine"),
        positional="[PROMPT ...]",
        examples="""\
  twinfer generate --temperature 0 --prompt "The capital of France is"
  twinfer generate --chat --tier reference --json "Name a primary colour."
  printf 'One\\nTwo\\n' | twinfer generate --max-tokens 8
  twinfer generate --input workload.jsonl --json --kv-cache-memory 64MiB""",
    ),
    Command(
        "chat",
        "talk to the model; earlier turns are reused through the prefix cache",
        _chat,
        options=("system", "tier", "sampling", "engine"),
        sampling=_CHAT_SAMPLING,
        examples="""\
  twinfer chat
  twinfer chat --system "You answer in one short sentence." --max-tokens 64""",
    ),
    Command(
        "serve",
        "serve an OpenAI-compatible HTTP API",
        _serve,
        options=("server", "tier", "engine"),
        examples="""\
  twinfer serve
  twinfer serve --host 0.0.0.0 --port 8000 --enable-prefix-caching --max-num-batched-tokens 8192""",
    ),
    Command(
        "diff",
        "run a workload on both tiers in lockstep and show the first difference",
        _diff,
        options=("workload", "engine"),
        positional="WORKLOAD.jsonl",
        examples="""\
  twinfer diff workload.jsonl
  twinfer diff workload.jsonl --num-blocks 24 --no-enable-prefix-caching""",
    ),
    Command(
        "trace",
        "run a workload and record what the engine decided in every step, and why",
        _trace,
        options=("workload", "trace", "tier", "engine"),
        positional="WORKLOAD.jsonl",
        examples="""\
  twinfer trace workload.jsonl --out run.json
  twinfer trace workload.jsonl --chrome run.chrome.json --tier reference --num-blocks 24""",
    ),
    Command(
        "conform",
        "replay schedules recorded from vLLM's scheduler and compare every step",
        _conform,
        options=("recording", "tier"),
        positional="FILE.jsonl.gz",
        examples="  twinfer conform vllm-schedules.jsonl.gz --tier reference",
    ),
    Command(
        "bench",
        "measure the engine, what it is made of, and other engines beside it",
        _bench,
        options=("bench",),
        positional="BENCHMARK",
        examples="""\
  twinfer bench throughput --workload mixed prefix
  twinfer bench roofline --save results/roofline
  twinfer bench peers --quick
  twinfer bench serve --request-rate 1 2 4 8 --save results/serve""",
    ),
    Command(
        "learn",
        "grade the exercises of the tutorial, or show a hint",
        _learn,
        options=("exercise",),
        positional="[NUMBER]",
        examples="""\
  twinfer learn
  twinfer learn 05
  twinfer learn 05 --hint""",
    ),
    Command(
        "model",
        "fetch the embedded model into the cache folder and prepare it",
        _model,
        options=("model",),
        positional="[MODEL]",
        examples="  twinfer model",
    ),
    Command(
        "app",
        "show every block and every step of real runs in the browser",
        _app,
        options=("app",),
        examples="  twinfer app --port 7860",
    ),
)


if __name__ == "__main__":
    raise SystemExit(main())
