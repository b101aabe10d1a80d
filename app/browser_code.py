"""What the browser gets: the parts of each viewer, in the order in which they build on one another, as one script."""

from __future__ import annotations

from importlib import resources

_ASSETS = resources.files("app").joinpath("assets")
_VIEWER = ("labels", "base", "unfold", "pool", "tables", "timeline", "pane", "whatif", "page")
_PARTS = {
    "viewer": tuple(f"viewer/{part}.js" for part in _VIEWER),
    "kernel": ("kernel/labels.js", "viewer/base.js", "kernel/model.js", "kernel/panels.js", "kernel/page.js"),
}
ICON = str(_ASSETS.joinpath("icon.svg"))


def script(name: str) -> str:
    """The viewer of runs ("viewer"), or that of kernels ("kernel")."""
    return "\n".join(map(asset, _PARTS[name]))


def styles() -> str:
    return asset("viewer.css") + asset("kernel.css")


def asset(name: str) -> str:
    return _ASSETS.joinpath(*name.split("/")).read_text(encoding="utf-8")
