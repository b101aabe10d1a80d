"""The tab with the kernel view: which rung, of which problem, and the viewer. Nothing is run before it is opened."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.browser_code import script
from app.kernel import BLOCK_SIZES, DTYPES, Problem, make_kernel_page, rungs, why_unavailable
from app.status import status


def kernel_tab(texts: gr.I18n) -> None:
    """The tab, within a page that is being built. `texts`: the page's labels."""
    names = rungs()
    start = Problem()
    with gr.Tab(texts("tab_kernel"), elem_id="tab-kernel") as tab:
        with gr.Row(elem_id="kernel-panel"):
            rung = gr.Dropdown(
                list(names), value=names[min(1, len(names) - 1)] if names else None, label=texts("rung"),
                interactive=bool(names), scale=2, min_width=200, elem_id="rung",
            )  # fmt: skip
            length = gr.Number(
                start.length, label=texts("length"), precision=0, interactive=bool(names), scale=1,
                min_width=140, elem_id="length",
            )  # fmt: skip
            block_size = gr.Dropdown(
                list(BLOCK_SIZES), value=start.block_size, label=texts("kernel_block_size"),
                interactive=bool(names), scale=1, min_width=120, elem_id="kernel-block-size",
            )  # fmt: skip
            dtype = gr.Dropdown(
                list(DTYPES), value=start.dtype, label=texts("dtype"), interactive=bool(names), scale=1,
                min_width=120, elem_id="dtype",
            )  # fmt: skip
        told = gr.HTML(
            status(*(why_unavailable() or ("",))), apply_default_css=False, elem_id="kernel-status"
        )
        viewer = gr.HTML(
            value="", html_template='<div class="tw" lang="en"></div>', js_on_load=script("kernel"), page=None,
            apply_default_css=False, elem_id="kernel-viewer",
        )  # fmt: skip
        if not names:
            return
        inputs, outputs = [rung, length, block_size, dtype], [viewer, told]
        changes = [tab.select, rung.input, length.submit, length.blur, block_size.input, dtype.input]
        gr.on(changes, _trace, inputs, outputs, show_progress="hidden")
        viewer.rung(_choose, None, [rung], show_progress="hidden").then(
            _trace, inputs, outputs, show_progress="hidden"
        )


def _choose(event: gr.EventData) -> str:
    """The rung that was clicked in the table of the viewer."""
    name = str(event.rung)
    return name if name in rungs() else rungs()[0]


def _trace(rung: str, length: int, block_size: int, dtype: str) -> tuple[Any, str]:
    try:
        page = make_kernel_page(rung, Problem(int(length or 0), int(block_size), dtype))
    except (ValueError, RuntimeError) as error:
        return gr.skip(), status(str(error), is_error=True)
    return gr.HTML(page=page), status("")
