"""Waits with log messages, while the worker finishes windows or a thread uploads them."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition

from instrument.log import logger

# Seconds before the first message, and between two messages.
_SILENT_S, _LOG_EVERY_S = 2.0, 60.0


def wait(changed: Condition, left: Callable[[], list[str]], timeout_s: float, whom: str) -> None:
    """Wait until `left()` is empty, for at most `timeout_s`, and log what is left.

    Args:
        changed: a condition that the caller holds; it is notified after each change.
        left: a function that returns the names of the unfinished windows, in order; called after
            each change.
        timeout_s: the longest wait, in seconds.
        whom: what the caller waits for, in the words of the messages: "exporter" or "upload".
    """
    began, total, due_s = time.monotonic(), len(left()), _SILENT_S
    while (names := left()) and (waited := time.monotonic() - began) < timeout_s:
        total = max(total, len(names))  # failed uploads may be tried again
        if waited >= due_s:
            due_s = waited + _LOG_EVERY_S
            logger.info(
                "Waiting for the {}, at most {:g} s: {} of {} windows are left (current: {})",
                whom,
                round(timeout_s, 1),
                len(names),
                total,
                names[0],
            )
        changed.wait(min(due_s, timeout_s) - waited)
