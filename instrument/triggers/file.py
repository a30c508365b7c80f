"""A touched file asks for a window; so does `ask`, from another process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from instrument import files
from instrument.errors import CaptureError
from instrument.triggers import Ask, Request, Trigger, TriggerCallbacks

_NAME = "record"
_LISTENS = (
    ".listens-"  # and some digits: what each process that listens makes, and `ask` writes into
)
_LONGEST = 20  # bytes of a request


class File(Trigger):
    """Records the next window when `record` in the session's folder is touched, or `instrument trigger` asks.

    A number in that file is the window's steps. It may be there or not, is never written or removed here, and counts
    only while it is empty or holds a number. Each process of a run looks every half second and takes each change once;
    ranks of a job record the same steps.
    """

    cooldown: int = Field(0, ge=0)
    max_windows: int | None = Field(20, ge=1)

    def begin(self, folder: Path, ask: Ask) -> TriggerCallbacks:
        """Make the file that `ask` looks for, and take what is there already for old."""
        own = folder / f"{_LISTENS}{secrets.token_hex(6)}"
        own.touch(mode=0o666, exist_ok=False)
        changed = _changed(folder / _NAME), _changed(own)

        def poll() -> None:
            for request, why in zip(
                changed, (f"the file {_NAME} was touched", "instrument trigger asked for it")
            ):
                if (text := request()) is not None:
                    ask(Request(why, int(text or 0) or None))

        return TriggerCallbacks(poll=poll, end=lambda: own.unlink(missing_ok=True))


def _changed(path: Path) -> Callable[[], str | None]:
    """What a file holds where it has changed since the last call; None where not, or where it holds no request."""
    seen = _stamp(path)

    def text() -> str | None:
        nonlocal seen
        before, seen = seen, _stamp(path)
        return _request(path) if seen is not None and seen != before else None

    return text


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _request(path: Path) -> str | None:
    """The number in the file, or nothing; None where it is the file of something else."""
    try:
        text = files.read_bytes(path, _LONGEST).decode("ascii", "replace").strip()
    except OSError:
        return None
    return text if not text or text.isdecimal() else None


def ask(folder: Path, steps: int | None) -> list[Path]:
    """Ask every run that listens in or below a folder for a window, and return the folders where some do.

    Raises:
        CaptureError: there is none.
    """
    asked = set()
    for path in [path for depth in range(6) for path in folder.glob("*/" * depth + _LISTENS + "*")]:
        if _request(path) is not None:
            with suppress(OSError):  # its run has just ended
                _write(path, f"{steps or 0}".encode())
                asked.add(path.parent)
    if not asked:
        raise CaptureError(
            f"No run listens in or below {folder}: it must run, with the file trigger: 'profiler/triggers=[file]'."
        )
    return sorted(asked)


def _write(path: Path, request: bytes) -> None:
    """Write a request into a file that is there, at once: nobody reads half a number, and no file is made anew."""
    handle = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.write(handle, request.rjust(_LONGEST))
    finally:
        os.close(handle)
