"""The `twinfer` program. Every mistake of a user is one sentence on stderr and exit status 2, never a traceback."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from reference.contracts.protocols import Tier
from reference.frontend.engine_args import DEFAULT_MODEL, EngineArgs
from reference.frontend.tiers import available_tiers, load_tier

_EXAMPLES = """\
examples:
  twinfer generate --temperature 0 --prompt "The capital of France is"
  twinfer generate --chat --tier reference --json "Name a primary colour."
  printf 'One\\nTwo\\n' | twinfer generate --max-tokens 8
  twinfer chat --system "You answer in one short sentence."
  twinfer diff workload.jsonl
  twinfer conform vllm-schedules.jsonl.gz --tier reference

Engine and sampling options have vLLM's names. TWINFER_HOME is the cache folder, TWINFER_LOGGING_LEVEL the log level.
"""


def main(argv: Sequence[str] | None = None, tier: str | None = None) -> int:
    """Run the program.

    Args:
        argv: arguments, those of the process unless given.
        tier: the tier to use when `--tier` is not given.

    Returns:
        Exit status: 0, 1 when a comparison found a difference, 2 on bad input, 130 on Ctrl-C.
    """
    arguments = _parser(tier).parse_args(argv)
    if getattr(arguments, "threads", None) is not None:
        _set_threads(arguments.threads)
    try:
        return int(arguments.run(arguments))
    except ValueError as error:
        print(f"twinfer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser(tier: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinfer",
        description="One LLM serving engine, written twice: `reference` to be read, `fast` to be quick.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"twinfer {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.set_defaults(run=run)
        return command

    generate = add(
        "generate", _generate, "Generate text for prompts from arguments, a file or standard input."
    )
    _add_tier(generate, tier)
    _add_prompt_options(generate)
    _add_sampling_options(generate, max_tokens=16)
    _add_engine_options(generate)

    chat = add("chat", _chat, "Talk to the model; earlier turns are reused through the prefix cache.")
    _add_tier(chat, tier)
    chat.add_argument("--system", metavar="TEXT", help="system message; the model's own unless given")
    _add_sampling_options(chat, max_tokens=512)
    _add_engine_options(chat)

    diff = add("diff", _diff, "Run a workload on both tiers in lockstep and show the first difference.")
    diff.add_argument("workload", type=Path, metavar="WORKLOAD.jsonl", help="see docs/workloads.md")
    _add_engine_options(diff)

    conform = add(
        "conform", _conform, "Replay schedules recorded from vLLM's scheduler and compare every step."
    )
    conform.add_argument("recording", type=Path, metavar="FILE.jsonl.gz", help="the recording")
    _add_tier(conform, tier)

    model = add("model", _model, "Fetch the embedded model into the cache folder and prepare it.")
    model.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="or prepare a folder or GGUF file")
    return parser


def _version() -> str:
    try:
        return version("twinfer")
    except PackageNotFoundError:
        return "(not installed)"


def _add_tier(parser: argparse.ArgumentParser, tier: str | None) -> None:
    parser.add_argument(
        "--tier",
        default=tier,
        metavar="NAME",
        help="fast or reference; unless given, fast if its extension is built",
    )


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts", "without any, one prompt a line is read from standard input")
    group.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt")
    group.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated"
    )
    group.add_argument("--input", type=Path, metavar="FILE.jsonl", help="a workload file")
    group.add_argument("--chat", action="store_true", help="wrap each prompt into the model's chat template")
    group.add_argument("--json", action="store_true", help="print one JSON object a line")


def _add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, default=1.0, help="0 always takes the most probable token"
    )
    group.add_argument("--top-p", type=float, default=1.0, help="keep the smallest set with this probability")
    group.add_argument("--top-k", type=int, default=0, help="keep the k most probable tokens; 0 keeps all")
    group.add_argument(
        "--sampling-seed", type=int, metavar="N", help="seed of the draws, the same for each prompt"
    )
    group.add_argument("--max-tokens", type=int, default=max_tokens, help="tokens to generate at most")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated"
    )
    group.add_argument(
        "--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help="end at these tokens"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    defaults = EngineArgs()
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default=defaults.model, help="embedded model, model folder or GGUF file")
    group.add_argument("--block-size", type=int, default=defaults.block_size, help="tokens a KV block holds")
    group.add_argument(
        "--max-num-seqs", type=int, default=defaults.max_num_seqs, help="requests that run at once"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=defaults.max_num_batched_tokens,
        help="tokens a step computes",
    )
    for name, text in (
        ("enable-prefix-caching", "reuse the KV blocks of equal prefixes"),
        ("enable-chunked-prefill", "compute long prompts over several steps"),
    ):
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=text)
    group.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        help="tokens one request gets in a step; 0: no limit",
    )
    group.add_argument(
        "--scheduling-policy", default="fcfs", choices=("fcfs", "priority"), help="who runs first"
    )
    group.add_argument("--num-blocks", type=int, help="size of the pool in blocks, with the null block")
    group.add_argument(
        "--kv-cache-memory",
        type=parse_memory,
        metavar="SIZE",
        help="size of the pool: bytes, or 512MiB, 1GiB",
    )
    group.add_argument(
        "--max-model-len", type=int, help="longest sequence; the model's own limit unless given"
    )
    group.add_argument("--seed", type=int, default=0, help="from which requests without a seed get theirs")
    group.add_argument("--device", default="auto", help="auto or cpu")
    group.add_argument("--threads", type=int, metavar="N", help="threads for matrix products and kernels")


def parse_memory(text: str) -> int:
    """Bytes from `1048576`, `512MiB`, `1.5GiB` or `2GB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmg]i?b?)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, 512MiB or 1GiB")
    number, unit = match.groups()
    base = 1000 if unit.endswith("b") and "i" not in unit else 1024
    return int(float(number) * base ** ("kmg".index(unit[0]) + 1 if unit else 0))


def _set_threads(threads: int) -> None:
    """Both BLAS and OpenMP read these when they are first loaded, which is after the arguments are parsed."""
    if threads < 1:
        raise SystemExit("twinfer: --threads must be at least 1.")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)


def pick_tier(name: str | None) -> Tier:
    """The named tier; without a name, fast if it is installed and its extension works, else reference."""
    if name is not None:
        return load_tier(name)
    if "fast" in available_tiers():
        fast = load_tier("fast")
        if fast.why_unavailable() is None:
            return fast
    return load_tier("reference")


def _engine_args(arguments: argparse.Namespace) -> EngineArgs:
    names = set(EngineArgs.__dataclass_fields__) & set(vars(arguments))
    return EngineArgs(**{name: getattr(arguments, name) for name in names})


def _sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "ignore_eos")
    return {**{name: getattr(arguments, name) for name in names}, "seed": arguments.sampling_seed}


def _generate(arguments: argparse.Namespace) -> int:
    from reference.frontend.generate import generate

    return generate(
        pick_tier(arguments.tier),
        _engine_args(arguments),
        _workload(arguments),
        as_json=arguments.json,
    )


def _workload(arguments: argparse.Namespace) -> Any:
    """The prompts as a workload: all arrive at once, in the order given."""
    from reference.contracts.sampling_params import SamplingParams
    from reference.frontend.workload import Workload, WorkloadRequest, read_workload

    texts = [*arguments.prompt, *arguments.prompts]
    if arguments.input is not None:
        if texts:
            raise ValueError("give prompts either as arguments or with --input, not both.")
        return read_workload(arguments.input)
    if not texts:
        if sys.stdin.isatty():
            raise ValueError(
                "no prompt: give one as an argument, with --prompt or --input, or pipe lines in."
            )
        texts = [line.rstrip("\n") for line in sys.stdin]
        texts = [text for text in texts if text]
        if not texts:
            raise ValueError("no prompt: standard input is empty.")
    params = SamplingParams(**_sampling_options(arguments))
    requests = []
    for number, text in enumerate(texts):
        if arguments.chat:
            message = {"role": "user", "content": text}
            requests.append(WorkloadRequest(str(number), messages=(message,), params=params))
        else:
            requests.append(WorkloadRequest(str(number), prompt=text, params=params))
    return Workload(tuple(requests))


def _chat(arguments: argparse.Namespace) -> int:
    from reference.contracts.sampling_params import SamplingParams
    from reference.frontend.chat_loop import ChatLoop
    from reference.frontend.llm_engine import LLMEngine

    params = SamplingParams(**_sampling_options(arguments))
    engine = LLMEngine.from_engine_args(_engine_args(arguments), pick_tier(arguments.tier))
    return ChatLoop(engine, params, arguments.system).run()


def _diff(arguments: argparse.Namespace) -> int:
    from reference.frontend.diff import compare_tiers
    from reference.frontend.report import print_diff
    from reference.frontend.workload import read_workload

    workload = read_workload(arguments.workload)
    # An option on the command line wins over the file's config, but a default does not.
    defaults = vars(_parser(None).parse_args(["diff", str(arguments.workload)]))
    names = set(EngineArgs.__dataclass_fields__) & set(defaults)
    options = {name: getattr(arguments, name) for name in names if getattr(arguments, name) != defaults[name]}
    model = cast(str, options.pop("model", workload.config.get("model", DEFAULT_MODEL)))
    report = compare_tiers((load_tier("reference"), load_tier("fast")), model, workload, **options)
    print_diff(report)
    return 0 if report.is_equal else 1


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


if __name__ == "__main__":
    raise SystemExit(main())
