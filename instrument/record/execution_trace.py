"""torch's execution trace (Chakra) of a window: its operators and tensors as a graph, for replay and simulation."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path

from loguru import logger
from torch.profiler import ExecutionTraceObserver


class ExecutionTrace:
    """One window's execution trace, which torch writes while the window records, into a hidden file in `folder`.

    The file's name holds the id of its `run`, whose lock tells others that it is still written. On torch 2.13 each
    operator costs some 8 µs, five times what recording it costs otherwise, and a kB of disk. What fails here costs the
    execution trace and is logged; the window is recorded all the same. A range whose name holds a quote, a backslash
    or a line break makes torch write what is no JSON.

    Attributes:
        path: the file; it goes with this object, unless it was moved away.
        observer: for torch's profiler, which starts and stops it with itself; None: there will be no execution trace.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.path = folder / f".execution_trace_{run}_{time.time_ns()}.partial.json"
        self.observer: ExecutionTraceObserver | None = None
        try:
            self.observer = ExecutionTraceObserver().register_callback(str(self.path))
        except TypeError:  # the folder's name is no UTF-8
            logger.warning(
                "No execution trace is written: torch can open no path such as {!r}.",
                str(self.path),
            )
            return
        weakref.finalize(self, _remove, self.path, os.getpid())
        if not self.path.exists():
            # torch says "registered" also where another observer is, and would take that one down with ours
            self.observer._registered = False
            self.observer = None
            logger.warning(
                "No execution trace is written: torch allows a process one observer, and another one is in use, "
                "or {} could not be opened.",
                self.path,
            )

    def end(self) -> None:
        """Finish the file and take the observer out of torch; harmless when repeated."""
        if self.observer is not None:
            self.observer.cleanup()


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has a copy of the object, not a file of its own
        path.unlink(missing_ok=True)
