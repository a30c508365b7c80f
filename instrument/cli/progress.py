"""A progress bar on stderr for each large file that a command reads.

Commands read a trace from its beginning to its end. A thread asks the operating system for the
position in each open file, so the code that reads the file does not have to report its progress.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from instrument.printable import is_terminal, printable

# How long a command runs before it shows a bar, and the time between two updates of the bar.
_AFTER_S, _EVERY_S = 0.5, 0.1
# Smaller files are read so fast that they need no bar.
_LEAST_BYTES = 1 << 20
_FOLDERS_OF_FILES = (Path("/proc/self/fd"), Path("/dev/fd"))


class OpenFile(NamedTuple):
    """A file that this process is reading: its name, position and size in bytes."""

    name: str
    position: int
    size: int


@contextmanager
def shown() -> Iterator[None]:
    """Show progress bars while the block runs, from 0.5 s after its start.

    If stderr is closed or not a terminal, no bar is shown.
    """
    if not is_terminal(sys.stderr) or os.environ.get("TERM") == "dumb":
        yield
        return
    done = Event()
    thread = Thread(target=_show_until, args=(done,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show_until(done: Event) -> None:
    if done.wait(_AFTER_S):
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    # A transient bar leaves no line behind.
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as progress:
        bars = {}
        while not done.wait(_EVERY_S):
            found = {file.name: file for file in files_being_read()}
            for name, file in found.items():
                if name not in bars:
                    bars[name] = progress.add_task(f"Reading {name}", total=file.size)
                progress.update(bars[name], completed=file.position)
            for name in bars.keys() - found.keys():
                progress.remove_task(bars.pop(name))


def files_being_read() -> list[OpenFile]:
    """Return the regular files of 1 MiB or more that this process has open for reading only."""
    folder = next((path for path in _FOLDERS_OF_FILES if path.is_dir()), None)
    if folder is None:
        return []
    found = []
    for link in folder.iterdir():
        with suppress(OSError, ValueError):  # the file has been closed in the meantime
            handle = int(link.name)
            state = os.fstat(handle)
            is_read_only = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if is_read_only and stat.S_ISREG(state.st_mode) and state.st_size >= _LEAST_BYTES:
                # Seeking by 0 bytes returns the position and does not change it.
                position = os.lseek(handle, 0, os.SEEK_CUR)
                found.append(OpenFile(_name(link), position, state.st_size))
    return found


def _name(link: Path) -> str:
    """Return the folder and name of an open file; "a trace" if the system does not tell them.

    On Linux, `link` is a symbolic link to the file. On other systems, it may be no link.
    """
    return printable("/".join(link.readlink().parts[-2:])) if link.is_symlink() else "a trace"
