"""The page: a panel that says what to run, and the viewer that shows it. Python runs engines and hands over JSON."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Read when gradio is imported: without it a page that should be local asks a server on the internet.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

import gradio as gr

from app.browser_code import ICON, script, styles
from app.files import load_run, save_run
from app.fork import fork, fork_lesson
from app.form import (
    BOTH,
    CHOICES,
    COLUMNS,
    FORM,
    NUMBERS,
    SWITCHES,
    changes_text,
    form_values,
    lesson_of,
    make_sides,
    parse_rows,
    parse_runs,
    preset_sides,
    run_sides,
    table_rows,
)
from app.kernel_tab import kernel_tab
from app.labels import LABELS
from app.live import live_lesson, watch
from app.presets import PRESETS, preset
from app.runs import SCRIPTED, Run
from app.state import make_page
from app.status import progress, status
from reference.frontend.engine_args import DEFAULT_MODEL
from reference.frontend.tiers import available_tiers, load_tier

T = gr.I18n(**LABELS)


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


def first_page() -> tuple[dict[str, Any], list[Run]]:
    """The first preset on the scripted model: it plays before anybody has touched anything."""
    chosen, tier = PRESETS[0], usable_tiers()[0]
    sides = preset_sides(chosen, SCRIPTED, tier)
    *_, runs = run_sides(sides, SCRIPTED)
    page = make_page(runs, {**lesson_of(chosen, sides, SCRIPTED), "autoplay": True})
    return page, runs


def _fill(key: str, model: str) -> list[Any]:
    """The form for a preset: table, options, comparison."""
    chosen = preset(key)
    workload = chosen.workload(0, model == SCRIPTED)
    return [
        table_rows(workload.requests),
        changes_text(chosen),
        *form_values(workload.config, chosen.sides[0].is_static),
    ]


def _run(key: str, model: str, tier: str, rows: list[list[Any]], changes: str, *values: Any) -> Iterator[Any]:
    """Run what the form says; yields (viewer, status, runs)."""
    chosen = preset(key)
    yield gr.skip(), status("Running.", "运行中。"), gr.skip()
    try:
        sides = make_sides(tier, parse_rows(rows), values, parse_runs(changes))
        lesson = {**lesson_of(chosen, sides, model), "autoplay": True, "key": os.urandom(4).hex()}
        for runs in run_sides(sides, model):
            is_done = len(runs) == len(sides) and runs[-1].is_done
            told = progress([len(run.traces) for run in runs], is_done)
            page = make_page(runs, lesson, is_same=tier == BOTH)
            yield gr.HTML(page=page), told, runs
    except (ValueError, MemoryError) as error:
        yield gr.skip(), status(str(error), is_error=True), gr.skip()


def _fork(runs: list[Run], event: gr.EventData) -> Iterator[Any]:
    """One of the runs on the page once more, with the changes that the viewer's form names; yields as `_run` does."""
    yield gr.skip(), status("Running.", "运行中。"), gr.skip()
    try:
        side, step, changes = int(event.side), int(event.step), dict(event.changes)
        run, key = runs[side], os.urandom(4).hex()
        for other in fork(run, step, changes):
            lesson = {**fork_lesson(run, step, changes), "key": key}
            told = progress([len(run.traces), len(other.traces)], other.is_done)
            yield gr.HTML(page=make_page([run, other], lesson)), told, [run, other]
    except (ValueError, MemoryError) as error:
        yield gr.skip(), status(str(error), is_error=True), gr.skip()


def _watch(url: str, api_key: str, allow_remote: bool) -> Iterator[Any]:
    """The steps of a running server; yields as `_run` does, until cancelled."""
    start = 2**31 - 1  # the last step there is
    try:
        for sight in watch(url, api_key, allow_remote):
            if sight is None:
                yield gr.skip(), gr.skip(), gr.skip()
                continue
            told = status(sight.sentence, sight.zh, sight.is_error)
            if sight.run is None:
                yield gr.skip(), told, gr.skip()
            else:
                lesson = {**live_lesson(sight.run), "key": sight.key, "start": start}
                yield gr.HTML(page=make_page([sight.run], lesson)), told, [sight.run]
    except ValueError as error:
        yield gr.skip(), status(str(error), is_error=True), gr.skip()


def _cancelled(runs: list[Run]) -> str:
    if all(run.is_done for run in runs):
        return status(
            "Cancelled before anything had come; the run before is still shown.",
            "已取消，尚无任何步；仍显示上一次运行。",
        )
    counts = [str(len(run.traces)) for run in runs]
    return status(
        f"Cancelled. Shown are the {' and '.join(counts)} steps that had come.",
        f"已取消。显示的是已完成的 {'、'.join(counts)} 步。",
    )


def _load(path: str | None) -> tuple[Any, Any, Any]:
    if path is None:
        return gr.skip(), gr.skip(), gr.skip()
    try:
        run = load_run(Path(path))
        told = status(f"Loaded: {len(run.traces)} steps.", f"已载入：{len(run.traces)} 步。")
        return gr.HTML(page=make_page([run])), told, [run]
    except ValueError as error:
        message = str(error).replace(path, Path(path).name)
        return gr.skip(), status(message, is_error=True), gr.skip()


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


def make_app(watch_url: str = "http://127.0.0.1:8000", watch_remote: bool = False) -> gr.Blocks:
    """The page; `launch` starts it, `mount.mount` puts it into another application.

    Args:
        watch_url: the server that stands in the field for watching one.
        watch_remote: let the page watch servers of other machines, too.
    """
    page, runs = first_page()
    with gr.Blocks(title="Twinfer", analytics_enabled=False, fill_width=True) as blocks:
        page_blocks: gr.Blocks = blocks
        with gr.Tab(T("tab_engine"), elem_id="tab-engine"):
            shown = gr.State(runs)
            chosen, model, tier, run_button, cancel = _panel()
            with gr.Accordion(T("details"), open=False, elem_id="details"):
                table, changes, form = _form()
                with gr.Row(elem_id="watching"):
                    url = gr.Textbox(
                        watch_url, label=T("watch_url"), info=T("watch_info"), scale=3, elem_id="watch-url"
                    )
                    key = gr.Textbox(
                        "",
                        label=T("watch_key"),
                        info=T("watch_key_info"),
                        type="password",
                        scale=2,
                        elem_id="watch-key",
                    )
                    watch_button = gr.Button(T("watch"), scale=0, min_width=140, elem_id="watch")
                with gr.Row():
                    load = gr.UploadButton(
                        "Load a trace file · 载入轨迹文件", file_types=[".json"], elem_id="load"
                    )
                    save = gr.Button(T("save"), elem_id="save")
                files = gr.File(
                    label=T("files"), file_count="multiple", interactive=False, elem_id="files", visible=False
                )
            told = gr.HTML(status("Ready.", "就绪。"), apply_default_css=False, elem_id="status")
            viewer = gr.HTML(
                value="", html_template='<div class="tw" lang="en"></div>', js_on_load=script("viewer"), page=page,
                apply_default_css=False, elem_id="viewer",
            )  # fmt: skip
            everything = [chosen, model, tier, table, changes, *form]
            outputs = [viewer, told, shown]
            filled = [table, changes, *form]
            running = [
                run_button.click(_run, everything, outputs, show_progress="hidden"),
                chosen.input(_fill, [chosen, model], filled, show_progress="hidden").then(
                    _run, everything, outputs, show_progress="hidden"
                ),
                tier.input(_run, everything, outputs, show_progress="hidden"),
                viewer.fork(_fork, [shown], outputs, show_progress="hidden"),
            ]
            # Each page watches for itself; the engines of the runs take turns.
            watching = gr.on(
                [watch_button.click, url.submit], partial(_watch, allow_remote=watch_remote), [url, key], outputs,
                show_progress="hidden", concurrency_limit=None, trigger_mode="once",
            )  # fmt: skip
            running.append(watching)
            model.input(_fill, [chosen, model], filled, show_progress="hidden")
            cancel.click(_cancelled, [shown], [told], cancels=running, show_progress="hidden")
            load.upload(_load, [load], outputs, show_progress="hidden")
            save.click(
                lambda runs: gr.File(_save(runs), visible=True), [shown], [files], show_progress="hidden"
            )
        kernel_tab(T)
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
            [("scripted (no weights) · 脚本（无权重）", SCRIPTED), DEFAULT_MODEL], value=SCRIPTED, label=T("model"),
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
        datatype=list(COLUMNS.values()), column_count=len(COLUMNS),
    )  # fmt: skip
    values = dict(zip(FORM, start[2:], strict=True))
    with gr.Row():
        form: list[Any] = [
            gr.Number(values[n], label=n, precision=0, min_width=150, elem_id=f"opt-{n}") for n in NUMBERS
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


def looks() -> dict[str, Any]:
    """How the page looks, however it is served."""
    return {
        "css": styles(),
        "theme": gr.themes.Default(primary_hue="blue", neutral_hue="zinc"),
        "i18n": T,
        "footer_links": [],
        "show_error": False,
        "ssr_mode": False,
    }


def launch(
    host: str = "127.0.0.1", port: int | None = None, block: bool = True, watch_remote: bool = False
) -> tuple[gr.Blocks, str]:
    """Start the server; returns the page and its address.

    Args:
        host: address to listen on; only this machine can reach the default.
        port: the port; the first free one from 7860 on unless given.
        block: return only when the server is stopped.
        watch_remote: see `make_app`.

    Raises:
        OSError: the port is taken; a sentence.
    """
    blocks = make_app(watch_remote=watch_remote)
    try:
        _, address, _ = blocks.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            favicon_path=ICON,
            **looks(),
        )
    except OSError as error:
        which = "No port from 7860 on is free" if port is None else f"Port {port} is taken or not allowed"
        raise OSError(f"{which} at {host}; choose another with --port.") from error
    print(f"Twinfer is at {address}", flush=True)
    if block:
        blocks.block_thread()
    return blocks, address
