"""Between the form and the engine: what stands in the fields, and what is run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.presets import Preset
from app.runs import SCRIPTED, Progress, Recording, Run
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import EngineArgs
from reference.frontend.workload import Workload, WorkloadRequest

BOTH = "both"
SHOW_EVERY_S = 0.7  # while a run is on its way
COLUMNS: dict[str, Literal["str", "number"]] = {
    "id": "str", "prompt": "str", "arrival_step": "number", "priority": "number", "n": "number",
    "max_tokens": "number", "temperature": "number", "top_p": "number", "seed": "str",
}  # fmt: skip
# The options of the form, in its order. What an option may be is the engine's business; the form only asks.
NUMBERS = (
    "block_size", "num_blocks", "max_num_batched_tokens", "long_prefill_token_threshold", "max_num_seqs",
    "max_model_len",
)  # fmt: skip
CHOICES = {"scheduling_policy": ("fcfs", "priority"), "preemption_mode": ("recompute", "swap")}
SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill")
FORM = (*NUMBERS, *CHOICES, *SWITCHES, "drafts", "static")
NEXT_RUN = "---"  # the line between the changes of one run and those of the next
MAX_RUNS = 3


@dataclass(frozen=True)
class Side:
    """What one side of the page runs."""

    title: str
    workload: Workload
    tier: str
    is_static: bool = False


def form_values(options: Mapping[str, Any], is_static: bool) -> list[Any]:
    """What the form shows for these options, in the order of `FORM`; 0 where an option is left to the engine."""
    defaults = EngineArgs()
    values: dict[str, Any] = {
        name: options.get(name, getattr(defaults, name)) for name in (*NUMBERS, *CHOICES, *SWITCHES)
    }
    values["drafts"] = (options.get("speculative") or {}).get("num_speculative_tokens", 0)
    values["static"] = is_static
    return [0 if values[name] is None else values[name] for name in FORM]


def form_options(values: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    """Engine options, those at their default left out, and whether batching is static.

    Raises:
        ValueError: a number is missing or not whole.
    """
    form = dict(zip(FORM, values, strict=True))
    is_static, drafts = bool(form.pop("static")), _whole("drafts", form.pop("drafts"))
    defaults, options = EngineArgs(), dict[str, Any]()
    for name, value in form.items():
        if name in NUMBERS:
            value = _whole(name, value)
            if getattr(defaults, name) is None and value == 0:
                continue
        if value != getattr(defaults, name):
            options[name] = value
    if drafts:
        options["speculative"] = {"method": "ngram", "num_speculative_tokens": drafts}
    return options, is_static


def _whole(name: str, value: Any) -> int:
    if value is None or isinstance(value, bool) or int(value) != value:
        raise ValueError(f"{name} must be a whole number.")
    return int(value)


def changes_text(chosen: Preset) -> str:
    """The runs of a preset but the first, as changes to the first: a line each, `name = JSON`; see `parse_runs`."""
    first, defaults = chosen.sides[0], EngineArgs()
    runs = []
    for side in chosen.sides[1:]:
        lines = []
        for name in dict.fromkeys((*first.options, *side.options)):
            value = side.options.get(name, chosen.options.get(name, getattr(defaults, name)))
            lines.append(f"{name} = {json.dumps(value)}")
        if first.is_static != side.is_static:
            lines.append(f"static = {json.dumps(side.is_static)}")
        runs.append("\n".join(lines))
    return f"\n{NEXT_RUN}\n".join(runs)


def parse_runs(text: str) -> list[dict[str, Any]]:
    """The changes of each further run, between lines of `---`; see `parse_changes`.

    Raises:
        ValueError: as `parse_changes` does, or there are too many runs.
    """
    runs: list[list[str]] = [[]]
    for line in (text or "").splitlines():
        if line.strip() == NEXT_RUN:
            runs.append([])
        else:
            runs[-1].append(line)
    changes = [found for lines in runs if (found := parse_changes("\n".join(lines)))]
    if len(changes) >= MAX_RUNS:
        raise ValueError(
            f"At most {MAX_RUNS} runs fit side by side; leave out some of those to compare with."
        )
    return changes


def parse_changes(text: str) -> dict[str, Any]:
    """Options from lines `name = value`; the value is JSON, or a plain word.

    Raises:
        ValueError: a line has no equals sign, or names no engine option.
    """
    changes: dict[str, Any] = {}
    for line in filter(str.strip, text.splitlines()):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or (name != "static" and name not in EngineArgs.__dataclass_fields__):
            raise ValueError(
                f"Write the options to compare with as lines like block_size = 8; {line.strip()!r} is none."
            )
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    return changes


def table_rows(requests: Sequence[WorkloadRequest]) -> list[list[Any]]:
    return [
        [
            r.request_id, r.prompt or "", r.arrival_step, r.priority, r.params.n, r.params.max_tokens,
            r.params.temperature, r.params.top_p, "" if r.params.seed is None else str(r.params.seed),
        ]
        for r in requests
    ]  # fmt: skip


def parse_rows(rows: Sequence[Sequence[Any]]) -> tuple[WorkloadRequest, ...]:
    """Requests from the table; rows without a prompt are passed over.

    Raises:
        ValueError: a cell is not acceptable; the sentence names the row.
    """
    requests = []
    for number, row in enumerate(rows, start=1):
        cells = dict(zip(COLUMNS, row, strict=True))
        if not str(cells["prompt"] or "").strip():
            continue
        try:
            requests.append(_request(cells, f"r{number}"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"Request {number} of the table: {error}") from error
    if not requests:
        raise ValueError("There is no request; write a prompt into the table.")
    ids = [request.request_id for request in requests]
    for name in ids:
        if ids.count(name) > 1:
            raise ValueError(f"The id {name!r} is used twice; every request needs its own.")
    return tuple(requests)


def _request(cells: Mapping[str, Any], default_id: str) -> WorkloadRequest:
    """Of one row; an empty cell is what it would be had nobody touched it."""
    seed = str(cells["seed"] if cells["seed"] is not None else "").strip()
    params = SamplingParams(
        n=int(cells["n"] or 1),
        max_tokens=int(cells["max_tokens"]),
        temperature=float(cells["temperature"] or 0),
        top_p=float(cells["top_p"] or 1),
        seed=int(seed) if seed else None,
        ignore_eos=True,
    )
    return WorkloadRequest(
        str(cells["id"] or default_id),
        prompt=str(cells["prompt"]),
        arrival_step=int(cells["arrival_step"] or 0),
        priority=int(cells["priority"] or 0),
        params=params,
    )


def make_sides(
    tier: str,
    requests: tuple[WorkloadRequest, ...],
    values: Sequence[Any],
    changes: Sequence[Mapping[str, Any]],
) -> list[Side]:
    """One side, or several: tier against tier, or options against options."""
    options, is_static = form_options(values)
    workload = Workload(requests, options)
    if tier == BOTH:
        return [Side(name, workload, name, is_static) for name in ("reference", "fast")]
    sides = [Side("A", workload, tier, is_static)]
    for change in changes:
        changed = {**options, **{name: value for name, value in change.items() if name != "static"}}
        sides.append(
            Side(
                change_title(change),
                Workload(requests, changed),
                tier,
                bool(change.get("static", is_static)),
            )
        )
    return sides


def change_title(change: Mapping[str, Any]) -> str:
    """`block_size = 8, preemption_mode = swap`."""
    values = {n: value if isinstance(value, str) else json.dumps(value) for n, value in change.items()}
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def preset_sides(chosen: Preset, model: str, tier: str) -> list[Side]:
    workload = chosen.workload(0, model == SCRIPTED)
    values = form_values(workload.config, chosen.sides[0].is_static)
    return make_sides(tier, workload.requests, values, parse_runs(changes_text(chosen)))


def lesson_of(chosen: Preset, sides: Sequence[Side], model: str) -> dict[str, Any]:
    """What stands above the run. The preset's names for its sides only while they are the preset's."""
    view: dict[str, Any] = {"title": chosen.title, "lesson": chosen.lesson, "facts": list(chosen.facts)}
    own = [
        (EngineArgs(**chosen.workload(i, model == SCRIPTED).config), side.is_static)
        for i, side in enumerate(chosen.sides)
    ]
    if [(EngineArgs(**side.workload.config), side.is_static) for side in sides] == own:
        view["sides"] = [side.title for side in chosen.sides]
    return view


def run_sides(sides: Sequence[Side], model: str) -> Iterator[list[Run]]:
    """The runs of the sides, one after another: now and then as far as they have come, and at the end.

    Raises:
        ValueError: see `Recording`.
    """
    done: list[Run] = []
    progress = Progress(SHOW_EVERY_S)
    for side in sides:
        recording = Recording(side.title, side.workload, model, side.tier, side.is_static)
        for _ in recording.play():
            if progress.is_due():
                yield [*done, recording.run(is_done=False)]
        done.append(recording.run())
    yield done
