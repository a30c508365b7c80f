"""Whether a run is still alive: a locked file in its folder for captures.

The kernel takes the lock away with the last process that holds it, however that ends. A process number would tell less:
containers that share a host's name have the same numbers.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_TRIES = 5


class RunLock:
    """The lock of one run, held by the trainer and, as it inherits the handle, by the worker beside it.

    Attributes:
        path: the locked file.
        handle: its descriptor; None while it is not held, and where the file system has no locks.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.path = path_of(folder, run)
        self.handle: int | None = None

    def hold(self) -> bool:
        """Take the lock, unless it is held already; gives whether it is held."""
        for _ in range(_TRIES if self.handle is None else 0):
            handle = _locked(self.path, os.O_CREAT)
            if handle is None:
                break
            if _is_at(handle, self.path):
                self.handle = handle
                _held.add(self)
                break
            os.close(handle)  # another process took the new file for a dead run's, and removed it
        return self.handle is not None

    def release(self, *, done: bool) -> None:
        """Let go of it. The file goes too where all of the run's work is `done`; else the worker removes it."""
        if self.handle is not None:
            self.forget()
            if done:
                self.path.unlink(missing_ok=True)
            else:
                remove_if_free(self.path)

    def forget(self) -> None:
        """Close this process's handle alone."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None
            _held.discard(self)


def path_of(folder: Path, run: str) -> Path:
    """The locked file of a run with this id."""
    return folder / f".run-{run}.lock"


def lives(folder: Path, run: str) -> bool | None:
    """Whether a process of that run is alive; None where locks do not tell."""
    if fcntl is None or not run:
        return None
    try:
        handle = os.open(path_of(folder, run), os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(handle)


def remove_if_free(path: Path) -> None:
    """Remove the file of a run that no process holds any more."""
    handle = _locked(path, 0)
    if handle is not None:
        path.unlink(missing_ok=True)
        os.close(handle)


def _locked(path: Path, create: int) -> int | None:
    """A descriptor of the file with the lock on it; None where it cannot be had."""
    if fcntl is None:
        return None
    try:
        handle = os.open(path, os.O_RDWR | create | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds it, or the file system has no locks
        os.close(handle)
        return None
    return handle


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except OSError:
        return False


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: close the handles, or the lock would outlive the run."""
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
