"""Starts threads of ours; one that cannot be started costs what it was for, and no training."""

from __future__ import annotations

from threading import Thread

from loguru import logger

_told: set[str] = set()


def start(thread: Thread, without: str) -> bool:
    """Start a thread; where the system gives none, warn once of what becomes of its work, and go on `without` it."""
    try:
        thread.start()
    except RuntimeError as error:
        if without not in _told:
            _told.add(without)
            logger.warning("No thread can be started ({}): {}.", error, without)
        return False
    return True
