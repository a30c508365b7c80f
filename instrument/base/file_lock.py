"""A locked file, which shows whether the process that made it is alive.

When the last process that holds a lock ends or is killed, the operating system releases the lock.
A process id in the file would not be enough, because processes in different containers can have the
same host name and the same id.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path

_TRIES = 5


class FileLock:
    """A lock that this process holds, and each process that inherits its handle, but no fork.

    `handle` is the descriptor of the locked file; None while the lock is not held.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle: int | None = None

    def hold(self) -> bool:
        """Take the lock unless this process holds it; return whether the process holds it now."""
        for _ in range(_TRIES if self.handle is None else 0):
            try:
                handle = _locked(self.path, os.O_CREAT)
            except OSError:
                break
            if _is_at(handle, self.path):
                self.handle = handle
                _held.add(self)
                break
            os.close(handle)  # another process removed the file, because it looked unused
        return self.handle is not None

    def release(self, *, done: bool) -> None:
        """Release the lock; remove its file if all work is `done`, or if nobody else holds it."""
        if self.handle is not None:
            self.forget()
            if done:
                with suppress(OSError):  # an unlocked file harms nobody
                    self.path.unlink()
            else:
                remove_if_free(self.path)

    def forget(self) -> None:
        """Close the handle of this process. An exporter that also holds the lock keeps the lock."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None
            _held.discard(self)


def is_held(path: Path) -> bool | None:
    """Whether a process holds the lock of a file; None if that cannot be found out."""
    try:
        os.close(_locked(path))
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except (OSError, ValueError):
        return None
    return False


def remove_if_free(path: Path) -> None:
    """Remove the file of a lock if no process holds the lock."""
    try:
        handle = _locked(path)
    except OSError:
        return
    path.unlink(missing_ok=True)
    os.close(handle)


def _locked(path: Path, create: int = 0) -> int:
    """Lock a file and return its descriptor; a BlockingIOError if it is locked already."""
    handle = os.open(path, os.O_RDWR | create | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def leave_to_parent() -> None:
    """Close the handles in a forked child, so that the lock does not outlive its process."""
    for lock in list(_held):
        lock.forget()
