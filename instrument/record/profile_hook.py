"""Restores the user's profile hook (`sys.setprofile`), which torch removes to record stacks."""

from __future__ import annotations

import sys
import threading
from typing import Any

from instrument.log import logger


class ProfileHook:
    """Keeps the profile hook of the current thread, to restore it later.

    Also keeps the hook of `threading.setprofile`, to warn if torch removed it from other threads.
    """

    def __init__(self) -> None:
        self._hook: Any = sys.getprofile()
        self._hook_of_threads = threading.getprofile()
        self._thread = threading.get_ident()

    def restore(self) -> None:
        """Set the current thread's hook again if torch removed this hook.

        A warning is logged about two kinds of hooks that cannot be set from here: hooks in C, such
        as cProfile's hook before Python 3.12, and the hooks of other threads.
        """
        if self._thread != threading.get_ident() or sys.getprofile() is self._hook:
            return
        if self._hook is None or callable(self._hook):
            sys.setprofile(self._hook)
        else:  # a hook in C
            logger.warning(
                "profiler.with_stack=true has stopped {!r}. Only the code that started this "
                "profile hook can start it again: use either with_stack or this hook.",
                self._hook,
            )
        if self._hook_of_threads is not None:
            logger.warning(
                "profiler.with_stack=true has removed the hook of threading.setprofile from the "
                "other running threads: set it there again."
            )

    def restore_in_child(self) -> None:
        """In a forked child: set the user's hook again if torch's hook is set; log nothing.

        Hooks in C, and hooks of other threads than the one that began the window, are lost.
        """
        current = sys.getprofile()
        if current is None or callable(current):  # torch's hook is in C
            return
        known = self._thread == threading.get_ident() and callable(self._hook)
        sys.setprofile(self._hook if known else None)
