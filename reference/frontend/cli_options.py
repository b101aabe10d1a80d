"""What `twinfer` understands: its commands, their options, and the text of `--help`.

Engine and sampling options have no defaults here. An option that was not given is absent from the result, so that what
was said on the command line can be told from what was not, and wins over a workload file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NoReturn

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import DEFAULT_MODEL, EngineArgs
from reference.frontend.server.options import add_server_options

ENGINE = tuple(field.name for field in fields(EngineArgs))
SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "sampling_seed", "max_tokens",
    "min_tokens", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip
STRUCTURED = ("json_schema", "json_object", "regex", "choice", "grammar", "disable_any_whitespace")

_ENVIRONMENT = """\
environment:
  TWINFER_HOME           cache folder of fetched and converted models
  TWINFER_LOGGING_LEVEL  DEBUG, INFO (default; a line of figures every 5 s), WARNING or ERROR"""

_WORKLOAD_FILE = """\
workload file, JSON lines:
  {"config": {"num_blocks": 24}}                       optional first line: engine options
  {"id": "a", "prompt": "Once", "arrival_step": 0, "abort_step": null, "priority": 0,
   "cache_salt": null, "sampling_params": {"temperature": 0, "max_tokens": 32}}
  A request, on one line, needs "prompt", "prompt_token_ids" or "messages"; the rest is optional.
  An option on the command line wins over the file."""


_DEFAULT_SAMPLING = SamplingParams()


@dataclass(frozen=True)
class Command:
    """One subcommand: `options` names the groups of options it takes, in the order of `--help`."""

    name: str
    summary: str
    run: Callable[[argparse.Namespace], int]
    options: Sequence[str]
    examples: str
    positional: str = ""  # in the usage line
    sampling: SamplingParams = _DEFAULT_SAMPLING  # defaults of its sampling options


def given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of the named options that were on the command line."""
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def make_parser(commands: Sequence[Command], tier: str | None) -> argparse.ArgumentParser:
    """The parser of the whole program; it raises ValueError on a mistake. `tier` is the default of `--tier`."""
    parser = _Parser(
        prog="twinfer",
        description="One LLM serving engine, written twice: `reference` to be read, `fast` to be quick.",
        epilog="\n".join(["examples:", *(command.examples for command in commands), "", _ENVIRONMENT]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"twinfer {_version()}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in commands:
        parts = [f"examples:\n{command.examples}"]
        if "prompts" in command.options or "workload" in command.options:
            parts.append(_WORKLOAD_FILE)
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            usage=" ".join(f"twinfer {command.name} [options] {command.positional}".split()),
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog="\n\n".join([*parts, _ENVIRONMENT]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        subparser.set_defaults(run=command.run, threads=None)
        for group in command.options:
            _GROUPS[group](subparser, command, tier)
    return parser


class _Parser(argparse.ArgumentParser):
    fill_when_used: Callable[[], None] | None = None  # adds options that are slow to find out

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.fill_when_used is not None:
            fill, self.fill_when_used = self.fill_when_used, None
            fill()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see `{self.prog} --help`.")


def _version() -> str:
    try:
        return version("twinfer")
    except PackageNotFoundError:
        return "(not installed)"


def _add(
    group: argparse._ActionsContainer, flag: str, text: str, default: Any = None, **details: Any
) -> None:
    """An option that is absent unless given; its default, which somebody else fills in, is only shown."""
    shown = "" if default is None else f" (default: {default})"
    group.add_argument(flag, default=argparse.SUPPRESS, help=f"{text}{shown}", **details)


def _add_tier(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    add_tier_option(parser, tier)


def add_tier_option(parser: argparse.ArgumentParser, tier: str | None) -> None:
    """`--tier`, with the default of this program."""
    default = tier or "fast if it can run here, else reference"
    parser.add_argument(
        "--tier", default=tier, metavar="NAME", help=f"reference or fast (default: {default})"
    )


def _add_prompts(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    group = parser.add_argument_group("prompts", "Without any, standard input is read, one prompt a line.")
    # One list for both, so that the order of the command line is kept.
    group.add_argument("prompts", nargs="*", action="extend", default=[], metavar="PROMPT", help="a prompt")
    group.add_argument(
        "--prompt", action="append", dest="prompts", metavar="TEXT", help="a prompt; repeatable"
    )
    group.add_argument("--input", type=Path, metavar="FILE.jsonl", help="requests from a workload file")
    group.add_argument("--chat", action="store_true", help="wrap each prompt into the model's chat template")
    group.add_argument("--json", action="store_true", help="print one JSON object a line")


def _add_system(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message (default: the model's own)")


def _add_workload(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    parser.add_argument("workload", type=Path, metavar="WORKLOAD.jsonl", help="the workload file")


def _add_trace(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    group = parser.add_argument_group("trace", "Without a file, only the totals are printed.")
    group.add_argument("--out", type=Path, metavar="FILE.json", help="write the steps as JSON")
    group.add_argument(
        "--chrome",
        type=Path,
        metavar="FILE.json",
        help="write a timeline for ui.perfetto.dev or chrome://tracing",
    )


def _add_recording(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    parser.add_argument("recording", type=Path, metavar="FILE.jsonl.gz", help="the recording")


def _add_model(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL",
        help=f"a model folder or GGUF file to prepare instead (default: {DEFAULT_MODEL})",
    )  # fmt: skip


def _add_app(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: this machine only)"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port (default: the first free one from 7860 on)"
    )


def _add_sampling(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    defaults = command.sampling
    group = parser.add_argument_group("sampling")
    if "prompts" in command.options:
        _add(group, "--n", "sequences to generate from each prompt", defaults.n, type=int, metavar="N")
    _add(
        group, "--temperature", "0 always takes the best token", defaults.temperature, type=float, metavar="T"
    )
    _add(
        group, "--top-p", "keep the smallest set of this probability", defaults.top_p, type=float, metavar="P"
    )
    _add(group, "--top-k", "keep the K best tokens; 0 keeps all", defaults.top_k, type=int, metavar="K")
    _add(group, "--min-p", "drop tokens below P times the best's probability", "0", type=float, metavar="P")
    _add_penalties(group)
    if "prompts" in command.options:
        _add(
            group,
            "--logprobs",
            "with --json: report the K best tokens at each position",
            type=int,
            metavar="K",
        )
        _add(
            group,
            "--prompt-logprobs",
            "with --json: the same for each token of the prompt",
            type=int,
            metavar="K",
        )
    _add(group, "--sampling-seed", "seed of every prompt's draws", "from --seed", type=int, metavar="N")
    _add(group, "--max-tokens", "tokens to generate at most", defaults.max_tokens, type=int, metavar="N")
    _add(group, "--min-tokens", "tokens before which nothing ends the output", "0", type=int, metavar="N")
    _add(group, "--stop", "end before this text; repeatable", action="append", metavar="TEXT")
    _add(
        group, "--stop-token-ids", "end with any of these tokens",
        action="extend", nargs="+", type=int, metavar="ID",
    )  # fmt: skip
    _add(group, "--ignore-eos", "go on past end-of-sequence tokens", action="store_true")
    _add_structured_outputs(group)


def _add_structured_outputs(group: argparse._ActionsContainer) -> None:
    """What the whole text must be; `StructuredOutputsParams` sees to it that only one is given."""
    _add(group, "--json-schema", "write JSON of this schema", type=parse_schema, metavar="JSON|FILE")
    _add(group, "--json-object", "write a JSON object", action="store_true")
    _add(
        group, "--disable-any-whitespace", "no spaces and line breaks between the parts of JSON",
        action="store_true",
    )  # fmt: skip
    _add(group, "--regex", "write a match of this expression", metavar="REGEX")
    _add(group, "--choice", "write this, or another choice; repeatable", action="append", metavar="TEXT")
    _add(
        group, "--grammar", "write a sentence of this grammar (Lark or GBNF)",
        type=parse_grammar, metavar="TEXT|FILE",
    )  # fmt: skip


def parse_schema(text: str) -> str:
    """A JSON schema from itself or from a file.

    Raises:
        argparse.ArgumentTypeError: there is no such file.
    """
    return text if text.lstrip().startswith("{") else _read(text)


def parse_grammar(text: str) -> str:
    """A grammar from itself or from a file; every rule has a colon, and the name of a file has none.

    Raises:
        argparse.ArgumentTypeError: there is no such file.
    """
    return text if ":" in text else _read(text)


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"the file {name!r} cannot be read ({reason})") from None


def _add_penalties(group: argparse._ActionsContainer) -> None:
    """What happens to logits before temperature."""
    for name, text, default in (
        ("repetition", "divides logits of tokens in prompt and output", "1"),
        ("presence", "subtracted from logits of tokens in the output", "0"),
        ("frequency", "subtracted once for each time in the output", "0"),
    ):
        _add(group, f"--{name}-penalty", text, default, type=float, metavar="X")
    _add(
        group, "--logit-bias", "add X to the logit of token ID; repeatable",
        action=_Bias, type=parse_bias, metavar="ID=X",
    )  # fmt: skip
    _add(
        group, "--allowed-token-ids", "generate nothing but these tokens",
        action="extend", nargs="+", type=int, metavar="ID",
    )  # fmt: skip
    _add(group, "--bad-words", "words to avoid; repeatable", action="extend", nargs="+", metavar="WORD")


class _Bias(argparse.Action):
    """Collects ID=X into a table."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **dict([values])})


def parse_bias(text: str) -> tuple[int, float]:
    """Token id and number from `504=-2.5`.

    Raises:
        argparse.ArgumentTypeError: the text is no such pair.
    """
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no bias: write ID=X, such as 504=-2.5") from None


def _add_engine(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    add_engine_options(parser)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options of `EngineArgs`; `given(arguments, ENGINE)` has those that were given."""
    group = parser.add_argument_group("engine", "Names and meanings are vLLM's.")
    defaults = EngineArgs()

    def add(name: str, text: str, default: Any = None, **details: Any) -> None:
        _add(group, f"--{name}", text, getattr(defaults, name.replace("-", "_")) or default, **details)

    number: dict[str, Any] = {"type": int, "metavar": "N"}
    switch: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    add("model", "embedded model, model folder or GGUF file", metavar="MODEL")
    add("block-size", "tokens a KV cache block holds", **number)
    add("max-num-seqs", "requests that run at once", **number)
    add("max-num-batched-tokens", "tokens one step computes at most", **number)
    add("enable-prefix-caching", "reuse the KV blocks of equal prefixes", **switch)
    add("enable-chunked-prefill", "compute a long prompt over several steps", **switch)
    add("long-prefill-token-threshold", "tokens of one request in a step", "no limit", **number)
    add("scheduling-policy", "who runs first", choices=("fcfs", "priority"))
    add("preemption-mode", "what becomes of a preempted request's KV blocks", choices=("recompute", "swap"))
    add(
        "swap-space", "host memory for swapped blocks: bytes, or 512MiB, 1GiB", "as much as the pool",
        type=parse_memory, metavar="SIZE",
    )  # fmt: skip
    add("max-num-partial-prefills", "prompts that are half computed at once", "no limit", **number)
    add("async-scheduling", "plan a step while the one before it is computed", **switch)
    add("num-blocks", "blocks of the pool, the null block included", "from memory", **number)
    add(
        "kv-cache-memory", "size of the pool: bytes, or 512MiB, 1GiB", "512MiB, less for a small model",
        type=parse_memory, metavar="SIZE",
    )  # fmt: skip
    add(
        "gpu-memory-utilization", "share of a GPU's memory for model, largest step and pool",
        type=float, metavar="SHARE",
    )  # fmt: skip
    add("max-model-len", "longest sequence in tokens", "the model's limit", **number)
    add(
        "speculative",
        """guess tokens to check several a step: {"method": "ngram", "num_speculative_tokens": 4}, or "draft_model" """
        "with a model",
        type=parse_speculative,
        metavar="JSON",
    )
    add("seed", "gives seeds to requests that have none", "0", **number)
    add("device", "auto, cpu, cuda, or simt: the CUDA kernels emulated", metavar="NAME")
    add("dtype", "float32, or bfloat16 on cuda and simt", metavar="NAME")
    group.add_argument("--threads", type=int, metavar="N", help="threads of the kernels (default: all cores)")


def _add_server(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    add_server_options(parser)


def parse_memory(text: str) -> int:
    """Bytes from `1048576`, `512MiB`, `1.5GiB` or `2GB`.

    Raises:
        argparse.ArgumentTypeError: the text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmg]i?b?)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write bytes, 512MiB or 1GiB")
    number, unit = match.groups()
    base = 1000 if unit.endswith("b") and "i" not in unit else 1024
    return int(float(number) * base ** ("kmg".index(unit[0]) + 1 if unit else 0))


def parse_speculative(text: str) -> dict[str, Any]:
    """The table of the option `speculative`; what may stand in it is checked by the engine.

    Raises:
        argparse.ArgumentTypeError: the text is no JSON object.
    """
    try:
        table = json.loads(text)
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise argparse.ArgumentTypeError(
            f'{text!r} is no JSON object: write \'{{"method": "ngram", "num_speculative_tokens": 4}}\''
        )
    return table


def _add_bench(parser: argparse.ArgumentParser, command: Command, tier: str | None) -> None:
    assert isinstance(parser, _Parser)
    parser.fill_when_used = lambda: command_entry("bench")(parser, tier)


def command_entry(name: str) -> Callable[..., Any]:
    """What the package that has the command `name` registers for it (entry-point group `twinfer.commands`).

    Raises:
        ValueError: nobody does.
    """
    for entry in entry_points(group="twinfer.commands", name=name):
        loaded: Callable[..., Any] = entry.load()
        return loaded
    raise ValueError(f"`twinfer {name}` is not installed; install the package again: `pip install -e .`.")


_GROUPS: dict[str, Callable[[argparse.ArgumentParser, Command, str | None], None]] = {
    "tier": _add_tier,
    "prompts": _add_prompts,
    "system": _add_system,
    "workload": _add_workload,
    "trace": _add_trace,
    "recording": _add_recording,
    "model": _add_model,
    "bench": _add_bench,
    "server": _add_server,
    "app": _add_app,
    "sampling": _add_sampling,
    "engine": _add_engine,
}
