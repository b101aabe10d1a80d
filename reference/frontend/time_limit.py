"""A time limit for Python code that cannot be trusted to end, such as a chat template."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class TimeLimitError(RuntimeError):
    """The code took too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError from inside the functions that the block calls when they run longer than that.

    A thread cannot be stopped from outside. So the block runs with a trace function, which Python calls at each line of
    each function, and which looks at the clock. Code that is traced already (by a debugger, say) has no limit.
    """
    if sys.gettrace() is not None:
        yield
        return
    deadline = time.monotonic() + seconds

    def check(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TimeLimitError(f"it took longer than {seconds:g} seconds")
        return check

    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(None)
