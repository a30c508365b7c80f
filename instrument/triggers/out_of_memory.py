"""What the allocator holds when memory runs out."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
from loguru import logger
from pydantic import Field

from instrument.config.options import Options
from instrument.rank_info import rank_info
from instrument.triggers import Ask, Step, TriggerCallbacks


class OutOfMemory(Options):
    """Keeps the snapshot of CUDA's allocator when `torch.OutOfMemoryError` leaves the session's block.

    The error goes on, and no window is asked for. The folder `out_of_memory_step_…` beside the captures gets
    `memory_snapshot.pickle`, which pytorch.org/memory_viz opens, and the error's text. Each allocation and free,
    `history` of them at most, is kept with its Python stack during the whole run, which costs the CPU a little each;
    0: only what lives at the end, without stacks. A window with `profiler.memory_snapshot` ends that history.
    """

    asks: ClassVar[bool] = False  # for a window, so that what is scheduled stays

    history: int = Field(100_000, ge=0)

    @classmethod
    def display_name(cls) -> str:
        """What error sentences call it."""
        return "The out_of_memory trigger"

    def fires(self, step: Step) -> None:
        """No step asks for a window."""

    def begin(self, folder: Path, ask: Ask) -> TriggerCallbacks:  # noqa: ARG002
        """Have the allocator keep its history."""
        keeps = self.history > 0 and torch.cuda.is_available()
        if keeps:
            torch.cuda.memory._record_memory_history(max_entries=self.history, stacks="python")

        def failed(error: BaseException, number: int) -> None:
            if isinstance(error, torch.OutOfMemoryError):
                kept = _keep_snapshot(folder, number, str(error), torch.cuda.memory._snapshot())
                logger.warning(
                    "Out of memory in step {}: the allocator's snapshot is in {}", number, kept
                )

        def end() -> None:
            if keeps:
                torch.cuda.memory._record_memory_history(enabled=None)

        return TriggerCallbacks(failed=failed, end=end)


def _keep_snapshot(folder: Path, number: int, error: str, snapshot: Any) -> Path:
    kept = next(path for path in _names(folder, number) if not path.exists())
    kept.mkdir()
    (kept / "memory_snapshot.pickle").write_bytes(pickle.dumps(snapshot))
    (kept / "error.txt").write_text(error + "\n", encoding="utf-8")
    return kept


def _names(folder: Path, number: int) -> Iterator[Path]:
    name = f"out_of_memory_step_{number:06d}_rank{rank_info().rank}"
    yield folder / name
    yield from (folder / f"{name}-{attempt}" for attempt in count(2))
