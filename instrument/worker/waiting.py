"""Waits with a progress report, while the worker finishes windows or a thread uploads them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Condition

from instrument.log import logger
from instrument.printable import is_terminal, printable

# Seconds before the first report, and seconds between two log messages.
_SILENT_S, _LOG_EVERY_S = 2.0, 60.0


def wait(changed: Condition, left: Callable[[], list[str]], timeout_s: float, whom: str) -> None:
    """Wait until `left()` is empty, for at most `timeout_s`, and show the progress.

    Args:
        changed: a condition that the caller holds; it is notified after each change.
        left: a function that returns the names of the unfinished windows, in order; called after
            each change.
        timeout_s: the longest wait, in seconds.
        whom: what the caller waits for, in the words of the messages: "exporter" or "upload".
    """
    began, total, reported = time.monotonic(), len(left()), False
    try:
        while (names := left()) and (waited := time.monotonic() - began) < timeout_s:
            reported = waited >= _SILENT_S
            total = max(total, len(names))  # failed uploads may be tried again
            pause = _report(names, total, timeout_s, whom) if reported else _SILENT_S
            changed.wait(min(pause, timeout_s - waited))
    finally:
        if reported and is_terminal(sys.stderr):
            print(end="\r\033[K", file=sys.stderr)


def _report(names: list[str], total: int, timeout_s: float, whom: str) -> float:
    """Show a progress bar on a terminal; without a terminal, log a message.

    Returns how many seconds to wait before the next report.
    """
    if not is_terminal(sys.stderr):
        logger.info(
            "Waiting for the {}, at most {:g} s: {} of {} windows are left (current: {})",
            whom,
            round(timeout_s, 1),
            len(names),
            total,
            names[0],
        )
        return _LOG_EVERY_S
    done = total - len(names)
    bar = "#" * (20 * done // total) + "-" * (20 - 20 * done // total)
    print(
        f"\r\033[KThe {whom} [{bar}] {done}/{total} (current: {printable(names[0])})",
        end="\r",
        file=sys.stderr,
        flush=True,
    )
    return 1.0
