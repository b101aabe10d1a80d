"""What if? A run once more, with other options: from a step on where that can be, else from the beginning.

The limits of the scheduler can change between two steps. The size of blocks and pool, the prefix cache, drafts and
static batching cannot: they have shaped every block table since the first step, so the whole run is done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from app.form import SHOW_EVERY_S, change_title
from app.runs import Change, Progress, Recording, Run, RunInfo
from reference.contracts.config import cdiv
from reference.frontend.engine_args import EngineArgs


@dataclass(frozen=True)
class Option:
    """An option that the page offers to change."""

    name: str
    kind: Literal["number", "switch", "choice"]
    in_mid_run: bool
    choices: tuple[str, ...] = ()
    least: int = 0  # of a number


OPTIONS = (
    Option("max_num_batched_tokens", "number", True, least=1),
    Option("max_num_seqs", "number", True, least=1),
    Option("long_prefill_token_threshold", "number", True),
    Option("enable_chunked_prefill", "switch", True),
    Option("scheduling_policy", "choice", True, ("fcfs", "priority")),
    Option("preemption_mode", "choice", True, ("recompute", "swap")),
    Option("max_num_partial_prefills", "number", True),
    Option("block_size", "number", False, least=1),
    Option("num_blocks", "number", False, least=2),
    Option("enable_prefix_caching", "switch", False),
    Option("drafts", "number", False),
    Option("static", "switch", False),
)
_BY_NAME = {option.name: option for option in OPTIONS}
FACTS = ("num_steps", "mean_latency_steps", "num_preemptions", "peak_blocks")


def settings(info: RunInfo) -> dict[str, Any]:
    """The value that each of `OPTIONS` has at the end of a run; None where it was left to the engine."""
    options = dict(info.options)
    for change in info.changes:
        options.update(change.options)
    args, values = EngineArgs(**options), dict[str, Any]()
    for option in OPTIONS:
        if option.name == "drafts":
            values["drafts"] = (args.speculative or {}).get("num_speculative_tokens", 0)
        elif option.name == "static":
            values["static"] = info.is_static
        else:
            values[option.name] = getattr(args, option.name)
    if values["num_blocks"] is None:
        values["num_blocks"] = info.num_blocks
    return values


def fork(run: Run, step: int, changes: Mapping[str, Any]) -> Iterator[Run]:
    """The run with changed options, as far as it has come every now and then, and at its end.

    Args:
        run: any run that knows its workload.
        step: from where on the changes count, if all of them can be made in mid-run.
        changes: values by name of `OPTIONS`.

    Raises:
        ValueError: the run cannot be done again, or an option is not acceptable.
    """
    if run.workload is None:
        raise ValueError(
            "This run came without its requests, so it cannot be run again; record it with the app."
        )
    check(changes)
    options, is_static, later = dict(run.info.options), run.info.is_static, run.info.changes
    if is_in_mid_run(changes):
        options.pop("kv_cache_memory", None)
        options["num_blocks"] = run.info.num_blocks
        later = (*(change for change in later if change.step < step), Change(step, dict(changes)))
    else:
        options, is_static = _whole(run.info, changes)
    title = change_title(changes)
    workload = replace(run.workload, config=options)
    recording = Recording(title, workload, run.info.model, run.info.tier, is_static, later)
    progress = Progress(SHOW_EVERY_S)
    for _ in recording.play():
        if progress.is_due():
            yield recording.run(is_done=False)
    yield recording.run()


def is_in_mid_run(changes: Mapping[str, Any]) -> bool:
    return all(_BY_NAME[name].in_mid_run for name in changes)


def check(changes: Mapping[str, Any]) -> None:
    """Raises ValueError unless every change is one of `OPTIONS` with a value of its kind."""
    if not changes:
        raise ValueError("Choose an option and a value that is not the one it has.")
    for name, value in changes.items():
        option = _BY_NAME.get(name)
        if option is None:
            raise ValueError(f"{name!r} is none of the options that can be changed here.")
        is_right = {
            "number": type(value) is int and value >= option.least,
            "switch": type(value) is bool,
            "choice": value in option.choices,
        }[option.kind]
        if not is_right:
            wanted = {
                "number": f"a whole number of at least {option.least}",
                "switch": "true or false",
                "choice": " or ".join(option.choices),
            }[option.kind]
            raise ValueError(f"{name} must be {wanted}.")


def _whole(info: RunInfo, changes: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Options from the beginning. Other blocks share out the same memory, unless their number is changed too."""
    options = {**info.options, **{n: v for n, v in changes.items() if n not in ("drafts", "static")}}
    if "block_size" in changes and "num_blocks" not in changes:
        options["num_blocks"] = same_memory(info, changes["block_size"])
        options.pop("kv_cache_memory", None)
    if "drafts" in changes:
        count = changes["drafts"]
        options["speculative"] = {"method": "ngram", "num_speculative_tokens": count} if count else None
    return options, bool(changes.get("static", info.is_static))


def same_memory(info: RunInfo, block_size: int) -> int:
    """Blocks of that size, the null block among them, in the memory that the run's pool had."""
    return max(cdiv((info.num_blocks - 1) * info.block_size, block_size), 1) + 1


def fork_lesson(run: Run, step: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What stands above the run and its fork; `names` are those of the sentence that compares them."""
    what = change_title(changes)
    if is_in_mid_run(changes):
        title = {"en": f"What if {what}, from step {step} on?", "zh": f"如果从第 {step} 步起 {what}？"}
        lesson = {
            "en": f"On the right the same run once more: up to step {step} with the old options, from there on with "
            "the new ones.",
            "zh": f"右侧是同一次运行的重演：第 {step} 步之前用旧选项，从那一步起用新选项。",
        }
        after = {"en": f"from step {step} on: {what}", "zh": f"从第 {step} 步起：{what}"}
    else:
        fixed = ", ".join(name for name in changes if not _BY_NAME[name].in_mid_run)
        title = {"en": f"What if {what}?", "zh": f"如果 {what}？"}
        lesson = {
            "en": f"{fixed} cannot change in mid-run: every block table since the first step depends on it. So on the "
            "right the whole run is done again.",
            "zh": f"{fixed} 无法在运行中途改变：从第一步起每张块表都取决于它。因此右侧把整个运行重做了一遍。",
        }
        after = {"en": what, "zh": what}
        if "block_size" in changes and "num_blocks" not in changes:
            blocks = same_memory(run.info, changes["block_size"]) - 1
            after = {
                "en": f"{what}: {blocks} blocks, the same memory",
                "zh": f"{what}：{blocks} 块，内存不变",
            }
    before = {"en": "as it was", "zh": "原样"}
    names = [before, {"en": "what if", "zh": "如果"}]
    return {
        "title": title, "lesson": lesson, "facts": list(FACTS), "sides": [before, after], "names": names, "start": step,
    }  # fmt: skip
