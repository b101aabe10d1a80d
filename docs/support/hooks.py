"""What mkdocs calls while it builds: pages without a translation say so in the reader's language."""

from __future__ import annotations

from typing import Any

NOTICE = '!!! note "本页还没有中文翻译，以下为英文原文。"\n\n'


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    is_chinese_site = config.plugins["i18n"].current_language == "zh"
    if not is_chinese_site or page.file.src_uri.endswith(".zh.md"):
        return markdown
    head, _, rest = markdown.partition("\n")  # the notice stands behind the title
    return f"{head}\n\n{NOTICE}{rest}" if head.startswith("# ") else NOTICE + markdown
