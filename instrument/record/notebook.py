"""Sends log messages to stdout in a notebook, because notebooks show stderr like an error."""

from __future__ import annotations

import os
import sys

from loguru import _defaults, logger

# The number of the handler that loguru itself adds, unless LOGURU_AUTOINIT is off; it writes to
# stderr. Numbers are not used twice.
_DEFAULT_HANDLER = 0
_FORMAT = "{time:HH:mm:ss} {level: <7} {message}"


def log_to_stdout() -> None:
    """In a notebook, replace loguru's default handler by a handler that prints below the cell.

    The program's own handlers stay as they are.
    """
    if "ipykernel" not in sys.modules or not getattr(_defaults, "LOGURU_AUTOINIT", False):
        return
    try:
        logger.remove(_DEFAULT_HANDLER)
    except ValueError:
        return
    level = os.environ.get("LOGURU_LEVEL", "DEBUG")
    logger.add(_print, level=level, format=_FORMAT)


def _print(message: str) -> None:
    print(message, end="")  # to the current stdout, which belongs to the running cell
