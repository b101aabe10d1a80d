"""What mkdocs calls while it builds: exercises at the end of chapters, scripts, heads, and pages without a translation.

The site is built in English first, then in Chinese. A page without a translation is shown in English there too, and
says so; it is not run a second time, but taken over from the English site as it was made there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

from docs.support import web
from docs.support.exercises import exercises_of

NOTICE = (
    '<div class="admonition note"><p class="admonition-title">本页还没有中文翻译，以下为英文原文。</p></div>'
)
# Each line of a signature gets an address of its own, the same in every signature of a page.
LINE_ADDRESS = re.compile(r'<a id="__codelineno-[^>]*></a>')
FIELD = re.compile(r'id="([^"]+)" class="doc doc-heading">\s*<code class="[^"]*doc-symbol-attribute"')


@dataclass
class _Made:
    html: str
    toc: Any
    anchors: set[str]


_made: dict[str, _Made] = {}  # English pages by name


def on_config(config: Any) -> None:
    if _language(config) == "en":  # `mkdocs serve` builds again and again
        _made.clear()


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    name = page.file.src_uri
    if _is_taken_over(name, config):
        found = re.search(r"^# (.*)$", markdown, re.MULTILINE)
        title = found[1] if found else ""  # for the navigation
        (heading,) = _made[name].toc
        return f"# {_translated_titles(config).get(title, title)} {{ #{heading.id} }}"
    exercises = exercises_of(name.replace(".zh.md", ".md"))
    if exercises:
        markdown += f"\n\n## {'练习' if name.endswith('.zh.md') else 'Exercises'}\n\n{exercises}\n"
    return markdown


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    name = page.file.src_uri
    if not _is_taken_over(name, config):
        if name.startswith("api/") and name != "api/index.md":
            html = LINE_ADDRESS.sub("", html)
            _shorten(page.toc, set(FIELD.findall(html)))
        html = web.with_scripts(html, page.url)
        if _language(config) == "en":
            _made[name] = _Made(html, page.toc, page.present_anchor_ids)
        return html
    made = _made[name]
    page.toc, page.present_anchor_ids = made.toc, made.anchors
    # Pages have neighbours of the same names in both languages; pictures are there once, a folder higher.
    content = re.sub(r'(src|href|srcset)="\.\./(images|assets)/', r'\1="../../\2/', made.html)
    return content.replace("</h1>", f"</h1>\n{NOTICE}", 1)


@event_priority(-100)  # links between entries of the API are filled in by another plugin at this event
def on_env(env: Any, config: Any, files: Any, **_: Any) -> None:
    if _language(config) == "en":
        for file in files.documentation_pages():
            if file.src_uri in _made:
                _made[file.src_uri].html = file.page.content


def on_post_build(config: Any, **_: Any) -> None:
    if _language(config) == "en":
        web.copy(Path(config.site_dir))


def on_post_page(output: str, config: Any, **_: Any) -> str:
    """Two mends of the theme. The links to a page's other language go from its head: a script would look for a sitemap
    beside each of them, in vain, and the menu of languages has links of its own. The search gets a name."""
    output = re.sub(r'<link rel="alternate"[^>]*>', "", output)
    name = "Search" if _language(config) == "en" else "搜索"
    return output.replace(
        'data-md-component="search" role="dialog"',
        f'data-md-component="search" role="dialog" aria-label="{name}"',
    )


def _shorten(entries: Any, fields: set[str]) -> None:
    """The contents of an API page: modules (level 2) by their whole names, and no fields."""
    for entry in entries:
        if entry.level == 2:
            entry.title = entry.id
        entry.children = [child for child in entry.children if child.id not in fields]
        _shorten(entry.children, fields)


def _language(config: Any) -> str:
    language: str = config.plugins["i18n"].current_language or "en"
    return language


def _translated_titles(config: Any) -> dict[str, str]:
    """Titles of untranslated pages, from the same list as the names of the sections."""
    titles: dict[str, str] = config.plugins["i18n"].current_language_config.nav_translations or {}
    return titles


def _is_taken_over(name: str, config: Any) -> bool:
    return _language(config) != "en" and name in _made and not name.endswith(".zh.md")
