"""The page inside somebody else's web application: `twinfer serve --app` shows it at /ui."""

from __future__ import annotations

from fastapi import FastAPI

from app.page import T, asset, make_app


def mount(web: FastAPI, path: str) -> None:
    """Add the page to a web application, whose lifespan must run: the page's queue starts with it.

    Args:
        web: the application; who may come in is its business.
        path: where in it, such as "/ui".
    """
    import gradio as gr  # app.page has told it to stay on this machine before it was imported

    gr.mount_gradio_app(
        web, make_app(), path, ssr_mode=False, css=asset("viewer.css"), footer_links=[], run_history=False,
        theme=gr.themes.Default(primary_hue="blue", neutral_hue="zinc"), i18n=T, show_error=False,
        mcp_server=False, enable_monitoring=False,
    )  # fmt: skip
