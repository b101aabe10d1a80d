"""The page inside somebody else's web application: `twinfer serve --app` shows it at /ui."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import FileResponse

from app.browser_code import ICON
from app.page import looks, make_app


def mount(web: FastAPI, path: str, watch_url: str = "http://127.0.0.1:8000") -> None:
    """Add the page to a web application, whose lifespan must run: the page's queue starts with it.

    Args:
        web: the application; who may come in is its business. Behind a proxy its root_path counts.
        path: where in it, such as "/ui".
        watch_url: the server that stands in the page's field for watching one.
    """
    import gradio as gr  # app.page has told it to stay on this machine before it was imported

    if not any(getattr(route, "path", None) == "/favicon.ico" for route in web.routes):
        # Browsers ask the root for it, where a mounted page is not.
        web.add_api_route("/favicon.ico", lambda: FileResponse(ICON), include_in_schema=False)
    gr.mount_gradio_app(
        web,
        make_app(watch_url),
        path,
        **looks(),
        run_history=False,
        mcp_server=False,
        enable_monitoring=False,
    )
