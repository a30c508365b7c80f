"""The lines that a worker of a `DataLoader` executes: worker 0 of each loader samples itself.

A worker that is started by `fork` does so; one that starts as a new interpreter does not.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from json import loads
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch.utils.data._utils import worker

from instrument.record.lines import LineSampler, Moment

# Only the workers that began last are read; a run may start some in every epoch.
_MOST_WORKERS = 8
_FORMAT = ("frames", "stacks", "counts", "waits")
_users = 0  # that have begun, and not ended
_folder: Path | None = None
_unwrap: Callable[[], None] | None = None


def begin() -> None:
    """Have workers that start from now on sample themselves, until `end`."""
    global _users, _folder, _unwrap
    _users += 1
    if _users > 1 or sys.version_info < (3, 11, 5):
        return
    try:
        _folder, loop = Path(mkdtemp(prefix="instrument-lines-")), worker._worker_loop
        parameters = inspect.signature(loop)
    except (OSError, AttributeError):  # no space, or another version of torch
        return

    @wraps(loop)  # so that it is pickled by the name of the original
    def sampled_loop(*args: Any, **kwargs: Any) -> Any:
        if parameters.bind(*args, **kwargs).arguments.get("worker_id") != 0 or _folder is None:
            return loop(*args, **kwargs)
        sampler = _sampler(_folder / f"{time.monotonic_ns()}.json").start()
        try:
            return loop(*args, **kwargs)
        finally:
            sampler.stop()

    def unwrap() -> None:
        if worker._worker_loop is sampled_loop:  # nobody else has wrapped it
            worker._worker_loop = loop

    worker._worker_loop, _unwrap = sampled_loop, unwrap


def collected() -> list[dict[str, Any]]:
    """What the workers have written so far, each as the file of a run."""
    found = []
    for path in sorted(_folder.glob("*.json"))[-_MOST_WORKERS:] if _folder else ():
        with suppress(OSError, ValueError):  # it ended while it wrote
            content = loads(path.read_text())
            found.append({key: content[key] for key in _FORMAT})
    return found


def end() -> None:
    """Sample no further workers, and remove their files."""
    global _users, _folder
    _users -= 1
    if not _users and _folder is not None:
        if _unwrap is not None:
            _unwrap()
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None


def _sampler(path: Path) -> LineSampler:
    """A sampler that writes its file more and more rarely, because a worker may be killed."""
    taken = 0

    def now() -> Moment:
        nonlocal taken
        taken += 1
        if taken >= 64 and taken.bit_count() == 1:
            sampler.write()
        return Moment("", 0, recording=False)

    sampler = LineSampler(path, now)
    return sampler
