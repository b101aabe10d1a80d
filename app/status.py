"""What the page says about what was asked of it."""

from __future__ import annotations

import html


def status(text: str, is_error: bool = False) -> str:
    """A line of text as HTML that screen readers announce; the text is escaped."""
    role = "alert" if is_error else "status"
    return f'<p class="{"tw-error" if is_error else "tw-status"}" role="{role}">{html.escape(text)}</p>'
