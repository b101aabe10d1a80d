"""The engine's log: the standard library's, with a level from the environment, as in vLLM."""

from __future__ import annotations

import logging
import os

LEVEL_VARIABLE = "TWINFER_LOGGING_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

logger = logging.getLogger("twinfer")


def configure_logging() -> None:
    """Set the level from `TWINFER_LOGGING_LEVEL` (INFO unless given), and write to stderr unless somebody else does.

    An application that has set up its own handlers keeps them and gets every record once.

    Raises:
        ValueError: the variable holds something else than a level.
    """
    level = os.environ.get(LEVEL_VARIABLE, "INFO").upper()
    if level not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}, got {level!r}.")
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
