"""Pictures of a trace as SVG: everything in them comes from the step that is shown, nothing is drawn by hand.

Colours come from the site's style sheet, so they follow the light and the dark theme; an owner is told by its letter as
well as by its colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from reference.contracts.trace import StepTrace

_CELL, _GAP = 44, 6


def pool_picture(
    trace: StepTrace, per_row: int = 8, caption: str = "", names: Sequence[str] | None = None
) -> str:
    """The physical blocks after the decisions of one step: owners, reference counts, hashes, and the free queue.

    Colours follow the place of an owner among `names`, which must be given where several pictures are compared.
    """
    cache = trace.state.cache
    num_blocks = len(cache.ref_counts) + cache.num_free_blocks
    owners: dict[int, list[str]] = {}
    for name, table in cache.block_tables.items():
        for block in table:
            owners.setdefault(block, []).append(name)
    names = sorted(cache.block_tables) if names is None else names
    place = {block: position for position, block in enumerate(cache.free_order, start=1)}
    pitch = _CELL + _GAP
    rows = -(-num_blocks // per_row)
    parts = []
    for block in range(1, num_blocks + 1):
        x, y = (block - 1) % per_row * pitch, (block - 1) // per_row * (pitch + 10)
        held_by = owners.get(block, [])
        style = f"tw-owner-{names.index(held_by[0]) % 6}" if held_by else "tw-free"
        mark = " tw-hashed" if block in cache.hashes else ""
        label = "+".join(held_by) if held_by else f"free, place {place[block]} in the queue"
        what = f"block {block}: {label}" + (", findable in the prefix cache" if mark else "")
        text = "+".join(held_by)[:5] if held_by else f"#{place[block]}"
        parts.append(
            f'<g><title>{escape(what)}</title><rect class="tw-block {style}{mark}" x="{x}" y="{y}" width="{_CELL}" '
            f'height="{_CELL}" rx="6"/><text class="tw-owner" x="{x + _CELL / 2}" y="{y + 26}">{escape(text)}</text>'
            f'<text class="tw-small" x="{x + 5}" y="{y + 12}">{block}</text></g>'
        )
    width, height = per_row * pitch, rows * (pitch + 10)
    title = caption or f"The block pool in step {trace.step}"
    return figure(f'viewBox="-2 -2 {width} {height}"', title, parts, min(width, 720))


def budget_bars(traces: Sequence[StepTrace], caption: str = "Tokens of each step") -> str:
    """One bar a step: prefill chunks, decodes and what was left of the budget."""
    top = max(trace.token_budget for trace in traces)
    width, height = 30, 120
    parts = []
    for index, trace in enumerate(traces):
        y = float(height)
        x = index * (width + 8) + 30
        for name, count in trace.num_scheduled_tokens.items():
            size = max(count / top * height, 2)
            y -= size
            kind = trace.kinds[name]
            title = f"step {trace.step}: {name} computes {count} ({kind})"
            parts.append(
                f'<g><title>{escape(title)}</title><rect class="tw-{kind}" x="{x}" y="{y:.1f}" width="{width}" '
                f'height="{size:.1f}"/></g>'
            )
        parts.append(f'<rect class="tw-outline" x="{x}" y="0" width="{width}" height="{height}"/>')
        parts.append(
            f'<text class="tw-small tw-middle" x="{x + width / 2}" y="{height + 14}">{trace.step}</text>'
        )
    parts.append(
        f'<text class="tw-small" x="0" y="10">{top}</text><text class="tw-small" x="0" y="{height}">0</text>'
    )
    total = len(traces) * (width + 8) + 34
    return figure(f'viewBox="-2 -6 {total} {height + 24}"', caption, parts, min(total * 1.4, 720))


def timeline(traces: Sequence[StepTrace], caption: str = "Who did what in each step") -> str:
    """Requests by steps: prefill, decode, waiting, preempted, swapped."""
    names = list(dict.fromkeys(
        name for trace in traces for name in (*trace.state.running, *trace.state.waiting, *trace.state.swapped)
    ))  # fmt: skip
    cell, label = 34, 52
    parts = []
    for row, name in enumerate(names):
        y = row * (cell + 4)
        parts.append(f'<text class="tw-name" x="0" y="{y + 22}">{escape(name)}</text>')
        for column, trace in enumerate(traces):
            x = label + column * (cell + 2)
            kind, text = _cell(trace, name)
            if kind:
                parts.append(
                    f'<g data-column="{column}">'
                    f"<title>{escape(f'step {trace.step}, {name}: {kind} {text}')}</title>"
                    f'<rect class="tw-{kind}" x="{x}" y="{y}" width="{cell}" height="{cell}" rx="4"/>'
                    f'<text class="tw-owner" x="{x + cell / 2}" y="{y + 21}">{escape(text)}</text></g>'
                )
    bottom = len(names) * (cell + 4)
    parts += [
        f'<text class="tw-small tw-middle" data-column="{column}" x="{label + column * (cell + 2) + cell / 2}" '
        f'y="{bottom + 10}">{trace.step}</text>'
        for column, trace in enumerate(traces)
    ]
    width = label + len(traces) * (cell + 2)
    kinds = {
        "prefill": "prefill, with its tokens", "decode": "decode", "waiting": "waits (w)", "swapped": "swapped out (s)",
    }  # fmt: skip
    legend = " ".join(
        f'<span class="tw-item"><span class="tw-key tw-{kind}"></span> {words}</span>'
        for kind, words in kinds.items()
    )
    return figure(f'viewBox="-2 -2 {width} {bottom + 16}"', caption, parts, min(width * 1.3, 760), legend)


def _cell(trace: StepTrace, name: str) -> tuple[str, str]:
    if name in trace.num_scheduled_tokens:
        return trace.kinds[name], str(trace.num_scheduled_tokens[name])
    if name in trace.state.swapped:
        return "swapped", "s"
    if name in trace.state.waiting:
        return "waiting", "w"
    return ("waiting", "-") if name in trace.state.running else ("", "")


def figure(
    view: str, caption: str, parts: Sequence[str], width: float, legend: str = "", words: str = ""
) -> str:
    """Raw HTML without blank lines, as Markdown wants it. `words` say what is to be seen where the caption does not."""
    body = "".join(parts)
    text = f"{caption}: {words}" if words else caption
    return (
        f'<figure class="tw-figure"><svg role="img" aria-label="{escape(text)}" {view} '
        f'style="max-width:{width:.0f}px" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
        f"<figcaption>{escape(caption)}{'<br>' + legend if legend else ''}</figcaption></figure>\n"
    )
