"""What the page says about what was asked of it."""

from __future__ import annotations

import html
from collections.abc import Sequence


def status(text: str, zh: str = "", is_error: bool = False) -> str:
    """A line of text as HTML that screen readers announce; the text is escaped.

    Args:
        text: in English; what an engine or a server refuses with has no other language.
        zh: the same in Chinese. The page shows the one of the viewer's language.
        is_error: announce it at once, and show it in red.
    """
    role = "alert" if is_error else "status"
    words = html.escape(text)
    if zh:
        words = (
            f'<span class="in-en">{words}</span><span class="in-zh" lang="zh-Hans">{html.escape(zh)}</span>'
        )
    return f'<p class="{"tw-error" if is_error else "tw-status"}" role="{role}">{words}</p>'


def progress(num_steps: Sequence[int], is_done: bool) -> str:
    """How far the runs have come."""
    counts, state = [str(number) for number in num_steps], "Done" if is_done else "Running"
    zh = f"{'完成' if is_done else '运行中'}：{'、'.join(counts)} 步。"
    return status(f"{state}: {' and '.join(counts)} steps.", zh)
