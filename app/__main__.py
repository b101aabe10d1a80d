"""`twinfer app` and `python -m app`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(host: str = "127.0.0.1", port: int | None = None, watch_remote: bool = False) -> int:
    """Serve the page until Ctrl-C; `watch_remote` lets it watch servers of other machines.

    Raises:
        ValueError: gradio is not installed, or too old.
        OSError: the port is taken.
    """
    try:
        from app.page import launch
    except ImportError as error:
        raise ValueError(
            f"The app needs the package gradio (import of {error.name} failed): `make app` installs it, and so does "
            f"`pip install twinfer[app]`."
        ) from error
    launch(host, port, watch_remote=watch_remote)
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m app", description="Show every block, every step and every reason."
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    parser.add_argument("--port", type=int, help="port (default: the first free one from 7860 on)")
    parser.add_argument(
        "--watch-remote", action="store_true", help="let the page watch servers of other machines, too"
    )
    arguments = parser.parse_args(argv)
    try:
        return main(arguments.host, arguments.port, arguments.watch_remote)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run())
