"""Requests a window after a file is touched, or after `instrument trigger` is run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from instrument.base import files
from instrument.base.errors import CaptureError
from instrument.base.file_lock import FileLock, is_held
from instrument.record.triggers.trigger import Request, RequestWindow, Trigger, TriggerCallbacks

_NAME = "record"
# Each process with this trigger creates a file with this prefix and random digits. `ask` writes
# requests into these files.
_PREFIX = ".listens-"
_REQUEST_BYTES = 20


class File(Trigger):
    """Records a window after the file `record` is touched, or after `instrument trigger` is run.

    The file is in the session's folder for captures. If it holds a number, that many steps are
    recorded; if it is empty, `profiler.active` steps. A file with any other text requests no
    window, nor does one that exists at the start until it is touched. The trigger never writes or
    removes the file `record`. Each process checks the file every half second; all ranks of a job
    record the same steps.
    """

    cooldown: int = Field(0, ge=0)
    max_windows: int | None = Field(20, ge=1)

    def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:
        """Create the hidden file that `instrument trigger` writes into; watch it and `record`."""
        own = folder / f"{_PREFIX}{secrets.token_hex(6)}"
        own.touch(mode=0o666, exist_ok=False)
        lock = FileLock(own)
        lock.hold()
        watched = {
            f"the file {_NAME} was touched": _watcher(folder / _NAME),
            "instrument trigger requested a window": _watcher(own),
        }

        def poll() -> None:
            if lock.handle is None:  # `ask` may have tested the lock at the start
                lock.hold()
            for why, new_request in watched.items():
                if (text := new_request()) is not None:
                    ask(Request(why, int(text or 0) or None))

        def end() -> None:
            lock.release(done=True)
            own.unlink(missing_ok=True)  # where files cannot be locked

        return TriggerCallbacks(poll=poll, end=end)


def _watcher(path: Path) -> Callable[[], str | None]:
    """Make a function that reads a file's request; it returns None while the file is unchanged."""
    seen = _stamp(path)

    def new_request() -> str | None:
        nonlocal seen
        before, seen = seen, _stamp(path)
        return _request(path) if seen is not None and seen != before else None

    return new_request


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _request(path: Path) -> str | None:
    """The number in a file, as text; "" for an empty file, None for any other file."""
    try:
        text = files.read_bytes(path, _REQUEST_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return text if not text or text.isdecimal() else None


def ask(folder: Path, steps: int | None) -> list[Path]:
    """Request a window from each run in or below a folder that has the trigger `file`.

    Folders up to five levels below `folder` are searched. `steps` is the number of steps to record;
    None for the `profiler.active` of each run. Returns the folders of these runs.

    Raises:
        CaptureError: no run in or below the folder has the trigger `file`.
    """
    asked = set()
    for path in [path for depth in range(6) for path in folder.glob("*/" * depth + _PREFIX + "*")]:
        if is_held(path) is not False and _request(path) is not None:  # not left by a killed run
            with suppress(OSError):  # the run has just ended
                _write(path, f"{steps or 0}".encode())
                asked.add(path.parent)
    if not asked:
        raise CaptureError(
            f"No run in or below {folder} has the trigger 'file': start the run with "
            "'profiler/triggers=[file]'."
        )
    return sorted(asked)


def _write(path: Path, request: bytes) -> None:
    """Write a request into an existing file with one call, so that no reader sees a part of it."""
    handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        os.write(handle, request.rjust(_REQUEST_BYTES))
    finally:
        os.close(handle)
