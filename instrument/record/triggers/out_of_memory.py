"""Saves a snapshot of CUDA's allocator when memory runs out."""

from __future__ import annotations

import pickle
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field

from instrument.base.log import logger
from instrument.base.options import Options
from instrument.base.rank_info import rank_info
from instrument.record.triggers.trigger import RequestWindow, Step, TriggerCallbacks


class OutOfMemory(Options):
    """Saves a snapshot of CUDA's allocator when `torch.OutOfMemoryError` ends the session.

    The snapshot is saved if the error leaves the session's `with` block. The error is not caught,
    and no window is requested. The snapshot and the text of the error are written to the folder
    `out_of_memory_step_…` beside the captures. Open the snapshot, `memory_snapshot.pickle`, on
    pytorch.org/memory_viz.

    During the whole run, torch keeps the last `history` allocations and frees with their Python
    stacks. This costs some CPU time for each allocation and free. With `history=0`, the snapshot
    holds only the memory that is in use at the end, without stacks. The end of a window with
    `profiler.memory_snapshot` turns the history off; a later snapshot is then the same as with
    `history=0`.
    """

    # Says that this trigger requests no window. So the windows of the schedule are still recorded.
    asks: ClassVar[bool] = False

    history: int = Field(100_000, ge=0)
    """How many allocations and frees to keep, with their stacks; 0: none."""

    @classmethod
    def display_name(cls) -> str:
        """The name of the trigger in error messages."""
        return "The out_of_memory trigger"

    def fires(self, step: Step) -> None:
        """Request no window: this trigger only saves a snapshot."""

    def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:  # noqa: ARG002
        """Start recording the allocator's history."""
        keeps = self.history > 0 and torch.cuda.is_available()
        if keeps:
            torch.cuda.memory._record_memory_history(max_entries=self.history, stacks="python")

        def failed(error: BaseException, number: int) -> None:
            if isinstance(error, torch.OutOfMemoryError):
                saved = _save_snapshot(folder, number, str(error), torch.cuda.memory._snapshot())
                logger.warning(
                    "Out of memory in step {}: the snapshot of the allocator is in {}",
                    number,
                    saved,
                )

        def end() -> None:
            if keeps:
                torch.cuda.memory._record_memory_history(enabled=None)

        return TriggerCallbacks(failed=failed, end=end)


def _save_snapshot(folder: Path, number: int, error: str, snapshot: Any) -> Path:
    name = f"out_of_memory_step_{number:06d}_rank{rank_info().rank}"
    names = chain([name], (f"{name}-{attempt}" for attempt in count(2)))
    target = next(folder / name for name in names if not (folder / name).exists())
    target.mkdir()
    (target / "memory_snapshot.pickle").write_bytes(pickle.dumps(snapshot))
    (target / "error.txt").write_text(error + "\n", encoding="utf-8")
    return target
