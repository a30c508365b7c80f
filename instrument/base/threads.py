"""Starts background threads. Training goes on if a thread cannot be started."""

from __future__ import annotations

from threading import Thread

from instrument.base.log import logger

_warned: set[str] = set()


def start(thread: Thread, without: str) -> bool:
    """Start a thread; return False if the system refuses it.

    Args:
        thread: the thread.
        without: the end of a warning, which says what happens without the thread. A warning with
            the same text is logged only once.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if without not in _warned:
            _warned.add(without)
            logger.warning("No thread can be started ({}): {}.", error, without)
        return False
    return True
