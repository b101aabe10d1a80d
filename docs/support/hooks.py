"""What mkdocs calls while it builds: exercises at the end of chapters, and pages without a translation say so."""

from __future__ import annotations

from typing import Any

from docs.support.exercises import exercises_of

NOTICE = '!!! note "本页还没有中文翻译，以下为英文原文。"\n\n'


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    name = page.file.src_uri
    is_translated = name.endswith(".zh.md")
    exercises = exercises_of(name.replace(".zh.md", ".md"))
    if exercises:
        markdown += f"\n\n## {'练习' if is_translated else 'Exercises'}\n\n{exercises}\n"
    if config.plugins["i18n"].current_language != "zh" or is_translated:
        return markdown
    head, _, rest = markdown.partition("\n")  # the notice stands behind the title
    return f"{head}\n\n{NOTICE}{rest}" if head.startswith("# ") else NOTICE + markdown
