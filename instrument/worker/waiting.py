"""What `stop` says while it waits for windows that others finish or send."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Condition

from loguru import logger

# How long is waited without a word, and then between two.
_SILENT_S, _PATIENT_S = 2.0, 60.0


def wait(changed: Condition, left: Callable[[], list[str]], timeout_s: float, whom: str) -> None:
    """Wait until nothing is left, at most the time allowed; say what for. `changed` is held, and told of each change.

    `left` names what is left, in order, and is asked again after each change.
    """
    began, total, said = time.monotonic(), len(left()), False
    try:
        while (names := left()) and (waited := time.monotonic() - began) < timeout_s:
            said, total = (
                waited >= _SILENT_S,
                max(total, len(names)),
            )  # those left before may have another try
            pause = _tell(names, total, timeout_s, whom) if said else _SILENT_S
            changed.wait(min(pause, timeout_s - waited))
    finally:
        if said and sys.stderr.isatty():
            print(end="\r\033[K", file=sys.stderr)


def _tell(names: list[str], total: int, timeout_s: float, whom: str) -> float:
    """Say what is waited for, on a terminal as a bar that is drawn anew; gives the seconds until the next word."""
    if not sys.stderr.isatty():
        logger.info(
            "Waits for the {}, at most {:g} s: {} of {} windows to go, now {}",
            whom,
            round(timeout_s, 1),
            len(names),
            total,
            names[0],
        )
        return _PATIENT_S
    done = total - len(names)
    bar = "#" * (20 * done // total) + "-" * (20 - 20 * done // total)
    print(
        f"\r\033[KThe {whom} [{bar}] {done}/{total}, now {names[0]}",
        end="\r",
        file=sys.stderr,
        flush=True,
    )
    return 1.0
