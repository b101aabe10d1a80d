"""The page: a panel that says what to run, and the viewer that shows it. Python runs engines and hands over JSON."""

from __future__ import annotations

import html
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

# Read when gradio is imported: without it a page that should be local asks a server on the internet.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

from app.labels import LABELS
from app.presets import PRESETS, Preset, preset
from app.runs import SCRIPTED, Progress, Recording, Run, load_run, save_run
from app.state import make_page
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import DEFAULT_MODEL, EngineArgs
from reference.frontend.tiers import available_tiers, load_tier
from reference.frontend.workload import Workload, WorkloadRequest

BOTH = "both"
SHOW_EVERY_S = 0.7  # while a run is on its way
COLUMNS = ("id", "prompt", "arrival_step", "priority", "n", "max_tokens", "temperature")
# The options of the form, in its order. What an option may be is the engine's business; the form only asks.
NUMBERS = (
    "block_size", "num_blocks", "max_num_batched_tokens", "long_prefill_token_threshold", "max_num_seqs",
    "max_model_len",
)  # fmt: skip
CHOICES = {"scheduling_policy": ("fcfs", "priority"), "preemption_mode": ("recompute", "swap")}
SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill")
FORM = (*NUMBERS, *CHOICES, *SWITCHES, "drafts", "static")

T = gr.I18n(**LABELS)


@dataclass(frozen=True)
class Side:
    """What one side of the page runs."""

    title: str
    workload: Workload
    tier: str
    is_static: bool = False


def usable_tiers() -> list[str]:
    """Tiers that can be imported here, the one to read first; without the built extension that is `reference` alone."""
    usable = []
    for name in sorted(available_tiers(), reverse=True):
        try:
            load_tier(name)
        except ValueError:
            continue
        usable.append(name)
    return usable


# ---- between the form and the engine ---


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
    """The second side of a preset as the changes to the first: a line each, `name = JSON`."""
    if len(chosen.sides) < 2:
        return ""
    first, second = chosen.sides
    defaults = EngineArgs()
    lines = []
    for name in dict.fromkeys((*first.options, *second.options)):
        value = second.options.get(name, chosen.options.get(name, getattr(defaults, name)))
        lines.append(f"{name} = {json.dumps(value)}")
    if first.is_static != second.is_static:
        lines.append(f"static = {json.dumps(second.is_static)}")
    return "\n".join(lines)


def parse_changes(text: str) -> dict[str, Any]:
    """Options from lines `name = value`; the value is JSON, or a plain word.

    Raises:
        ValueError: a line has no equals sign, or names no engine option.
    """
    changes: dict[str, Any] = {}
    for line in filter(str.strip, (text or "").splitlines()):
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
            r.params.temperature,
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
        prompt = str(cells["prompt"] or "")
        if not prompt.strip():
            continue
        try:
            n = int(cells["n"] or 1)
            temperature = float(cells["temperature"] or 0)
            params = SamplingParams(
                n=n, max_tokens=int(cells["max_tokens"]), temperature=temperature, ignore_eos=True,
                seed=1 if temperature else None,
            )  # fmt: skip
            requests.append(
                WorkloadRequest(
                    str(cells["id"] or f"r{number}"),
                    prompt=prompt,
                    arrival_step=int(cells["arrival_step"] or 0),
                    priority=int(cells["priority"] or 0),
                    params=params,
                )
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"Request {number} of the table: {error}") from error
    if not requests:
        raise ValueError("There is no request; write a prompt into the table.")
    ids = [request.request_id for request in requests]
    for name in ids:
        if ids.count(name) > 1:
            raise ValueError(f"The id {name!r} is used twice; every request needs its own.")
    return tuple(requests)


def make_sides(
    tier: str, requests: tuple[WorkloadRequest, ...], values: Sequence[Any], changes: Mapping[str, Any]
) -> list[Side]:
    """One side, or two: tier against tier, or options against options."""
    options, is_static = form_options(values)
    workload = Workload(requests, options)
    if tier == BOTH:
        return [Side(name, workload, name, is_static) for name in ("reference", "fast")]
    sides = [Side("A", workload, tier, is_static)]
    if changes:
        changed = {**options, **{name: value for name, value in changes.items() if name != "static"}}
        title = ", ".join(f"{name} = {json.dumps(value)}" for name, value in changes.items())
        sides.append(Side(title, Workload(requests, changed), tier, bool(changes.get("static", is_static))))
    return sides


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


# ---- the page ---


def asset(name: str) -> str:
    return resources.files("app").joinpath("assets", name).read_text(encoding="utf-8")


def first_page() -> tuple[dict[str, Any], list[Run]]:
    """The first preset on the scripted model: it plays before anybody has touched anything."""
    chosen, tier = PRESETS[0], usable_tiers()[0]
    sides = preset_sides(chosen, SCRIPTED, tier)
    *_, runs = run_sides(sides, SCRIPTED)
    page = make_page(runs, {**lesson_of(chosen, sides, SCRIPTED), "autoplay": True})
    return page, runs


def preset_sides(chosen: Preset, model: str, tier: str) -> list[Side]:
    workload = chosen.workload(0, model == SCRIPTED)
    values = form_values(workload.config, chosen.sides[0].is_static)
    return make_sides(tier, workload.requests, values, parse_changes(changes_text(chosen)))


def _fill(key: str, model: str) -> list[Any]:
    """The form for a preset: table, options, comparison."""
    chosen = preset(key)
    workload = chosen.workload(0, model == SCRIPTED)
    return [
        table_rows(workload.requests),
        changes_text(chosen),
        *form_values(workload.config, chosen.sides[0].is_static),
    ]


def _status(text: str, is_error: bool = False) -> str:
    role = "alert" if is_error else "status"
    return f'<p class="{"tw-error" if is_error else "tw-status"}" role="{role}">{html.escape(text)}</p>'


def _run(key: str, model: str, tier: str, rows: list[list[Any]], changes: str, *values: Any) -> Iterator[Any]:
    """Run what the form says; yields (viewer, status, runs)."""
    chosen = preset(key)
    yield gr.skip(), _status("Running."), gr.skip()
    try:
        sides = make_sides(tier, parse_rows(rows), values, parse_changes(changes))
        lesson = {**lesson_of(chosen, sides, model), "autoplay": True, "key": os.urandom(4).hex()}
        for runs in run_sides(sides, model):
            is_done = len(runs) == len(sides) and runs[-1].is_done
            steps = " and ".join(str(len(run.traces)) for run in runs)
            status = f"{'Done' if is_done else 'Running'}: {steps} steps."
            page = make_page(runs, lesson, is_same=tier == BOTH)
            yield gr.HTML(page=page), _status(status), runs
    except (ValueError, MemoryError) as error:
        yield gr.skip(), _status(str(error), is_error=True), gr.skip()


def _cancelled(runs: list[Run]) -> str:
    if all(run.is_done for run in runs):
        return _status("Cancelled before anything had come; the run before is still shown.")
    steps = " and ".join(str(len(run.traces)) for run in runs)
    return _status(f"Cancelled. Shown are the {steps} steps that had come.")


def _load(path: str | None) -> tuple[Any, Any, Any]:
    if path is None:
        return gr.skip(), gr.skip(), gr.skip()
    try:
        run = load_run(Path(path))
        return gr.HTML(page=make_page([run])), _status(f"Loaded: {len(run.traces)} steps."), [run]
    except ValueError as error:
        message = str(error).replace(path, Path(path).name)
        return gr.skip(), _status(message, is_error=True), gr.skip()


def _save(runs: list[Run]) -> list[str]:
    """One file a run, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="twinfer-"))
    paths = []
    for number, run in enumerate(runs):
        name = re.sub(r"[^\w-]+", "-", run.info.title).strip("-")[:40] or "run"
        path = folder / f"{number + 1}-{name}.trace.json"
        save_run(run, path)
        paths.append(str(path))
    return paths


def make_app() -> gr.Blocks:
    """The page; `launch` starts it."""
    page, runs = first_page()
    with gr.Blocks(title="Twinfer", analytics_enabled=False, fill_width=True) as blocks:
        page_blocks: gr.Blocks = blocks
        shown = gr.State(runs)
        chosen, model, tier, run_button, cancel = _panel()
        with gr.Accordion(T("details"), open=False, elem_id="details"):
            table, changes, form = _form()
            with gr.Row():
                load = gr.UploadButton(
                    "Load a trace file · 载入轨迹文件", file_types=[".json"], elem_id="load"
                )
                save = gr.Button(T("save"), elem_id="save")
            files = gr.File(
                label=T("files"), file_count="multiple", interactive=False, elem_id="files", visible=False
            )
        status = gr.HTML(_status("Ready."), apply_default_css=False, elem_id="status")
        viewer = gr.HTML(
            value="", html_template='<div class="tw" lang="en"></div>', js_on_load=asset("viewer.js"), page=page,
            apply_default_css=False, elem_id="viewer",
        )  # fmt: skip
        everything = [chosen, model, tier, table, changes, *form]
        outputs = [viewer, status, shown]
        filled = [table, changes, *form]
        running = [
            run_button.click(_run, everything, outputs, show_progress="hidden"),
            chosen.input(_fill, [chosen, model], filled, show_progress="hidden").then(
                _run, everything, outputs, show_progress="hidden"
            ),
            tier.input(_run, everything, outputs, show_progress="hidden"),
        ]
        model.input(_fill, [chosen, model], filled, show_progress="hidden")
        cancel.click(_cancelled, [shown], [status], cancels=running, show_progress="hidden")
        load.upload(_load, [load], outputs, show_progress="hidden")
        save.click(lambda runs: gr.File(_save(runs), visible=True), [shown], [files], show_progress="hidden")
    return page_blocks


def _panel() -> tuple[Any, ...]:
    """Lesson, model, tier, and the two buttons."""
    tiers = usable_tiers()
    with gr.Row(elem_id="panel"):
        chosen = gr.Dropdown(
            [(f"{p.title['en']} · {p.title['zh']}", p.key) for p in PRESETS], value=PRESETS[0].key,
            label=T("preset"), scale=4, min_width=260, elem_id="preset",
        )  # fmt: skip
        model = gr.Dropdown(
            [("scripted (no weights)", SCRIPTED), DEFAULT_MODEL], value=SCRIPTED, label=T("model"),
            allow_custom_value=True, scale=2, min_width=160, elem_id="model",
        )  # fmt: skip
        tier = gr.Dropdown(
            [*tiers, *([BOTH] if len(tiers) > 1 else [])], value=tiers[0], label=T("tier"), scale=1, min_width=120,
            elem_id="tier",
        )  # fmt: skip
        run_button = gr.Button(T("run"), variant="primary", scale=0, min_width=90, elem_id="run")
        cancel = gr.Button(T("cancel"), scale=0, min_width=90, elem_id="cancel")
    return chosen, model, tier, run_button, cancel


def _form() -> tuple[Any, Any, list[Any]]:
    """Requests, comparison, and the options in the order of `FORM`."""
    start = _fill(PRESETS[0].key, SCRIPTED)
    table = gr.Dataframe(
        value=start[0], headers=list(COLUMNS), type="array", interactive=True, label=T("requests"), elem_id="requests",
        datatype=["str", "str", "number", "number", "number", "number", "number"], column_count=len(COLUMNS),
    )  # fmt: skip
    values = dict(zip(FORM, start[2:], strict=True))
    with gr.Row():
        form: list[Any] = [
            gr.Number(values[n], label=n, precision=0, minimum=0, min_width=150, elem_id=f"opt-{n}")
            for n in NUMBERS
        ]
    with gr.Row():
        form += [
            gr.Dropdown(list(c), value=values[n], label=n, min_width=150, elem_id=f"opt-{n}")
            for n, c in CHOICES.items()
        ]
        form += [gr.Checkbox(values[n], label=n, min_width=150, elem_id=f"opt-{n}") for n in SWITCHES]
        form.append(
            gr.Number(
                values["drafts"],
                label=T("drafts"),
                precision=0,
                minimum=0,
                min_width=150,
                elem_id="opt-drafts",
            )
        )
        form.append(gr.Checkbox(values["static"], label=T("static"), min_width=150, elem_id="opt-static"))
    changes = gr.Textbox(
        start[1],
        label=T("compare"),
        info=T("compare_info"),
        lines=2,
        placeholder="block_size = 8",
        elem_id="changes",
    )
    return table, changes, form


def launch(host: str = "127.0.0.1", port: int | None = None, block: bool = True) -> tuple[gr.Blocks, str]:
    """Start the server; returns the page and its address.

    Args:
        host: address to listen on; only this machine can reach the default.
        port: the port; the first free one from 7860 on unless given.
        block: return only when the server is stopped.

    Raises:
        OSError: the port is taken.
    """
    blocks = make_app()
    _, address, _ = blocks.launch(
        server_name=host, server_port=port, share=False, quiet=True, prevent_thread_lock=True, ssr_mode=False,
        css=asset("viewer.css"), footer_links=[],
        theme=gr.themes.Default(primary_hue="blue", neutral_hue="zinc"), i18n=T, show_error=False,
    )  # fmt: skip
    print(f"Twinfer is at {address}", flush=True)
    if block:
        blocks.block_thread()
    return blocks, address
