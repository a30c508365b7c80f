"""Gives the user's profile hook (`sys.setprofile`) back, which torch takes away where it records stacks."""

from __future__ import annotations

import sys
import threading
from typing import Any

from loguru import logger


class ProfileHook:
    """The hook of the thread that makes it, and whether other threads may have one."""

    def __init__(self) -> None:
        self._hook: Any = sys.getprofile()
        self._of_others = threading.getprofile()
        self._thread = threading.get_ident()

    def give_back(self) -> None:
        """Set the hook again where it is gone, and warn of one that only its owner can set."""
        if self._thread != threading.get_ident() or sys.getprofile() is self._hook:
            return
        if self._hook is None or callable(self._hook):
            sys.setprofile(self._hook)
        else:  # a hook in C, as that of cProfile before Python 3.12
            logger.warning(
                "profiler.with_stack=true has ended the profiling by {!r}, which only its owner can begin again: "
                "use one of the two.",
                self._hook,
            )
        if self._of_others is not None:
            logger.warning(
                "profiler.with_stack=true has taken the hook of threading.setprofile from the other threads that run: "
                "set it there again."
            )
