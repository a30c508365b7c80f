"""Waits: for a condition; with log messages, for the exporter or a thread that uploads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from instrument.base.log import logger

# Seconds before the first message, between two messages, and between two looks at what is left.
_SILENT_S, _LOG_EVERY_S, _LOOK_EVERY_S = 2.0, 60.0, 0.1
_POLL_S = 0.05


def poll(is_over: Callable[[], bool], timeout_s: float | None) -> None:
    """Call `is_over` every 50 ms until it returns true, for at most `timeout_s`; None: no limit."""
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not is_over() and time.monotonic() < until:
        time.sleep(_POLL_S)


def wait_for(
    ended: Callable[[float], bool],
    left: Callable[[], list[str]],
    timeout_s: float,
    closing_s: float,
    whom: str,
) -> None:
    """Wait until a thread or process ends, and log what is left.

    Args:
        ended: waits at most so many seconds for the end, and returns whether it has come.
        left: a function that returns the names of the unfinished windows, in order.
        timeout_s: the longest wait.
        closing_s: the longest wait once nothing is left.
        whom: what the caller waits for, in the messages: "exporter" or "upload".
    """
    began, total, due_s = time.monotonic(), 0, _SILENT_S
    while (waited := time.monotonic() - began) < timeout_s:
        if not (names := left()):
            ended(min(closing_s, timeout_s - waited))
            return
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
        if ended(min(_LOOK_EVERY_S, timeout_s - waited)):
            return
