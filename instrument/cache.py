"""The one folder of this user for what can be made again: `~/.cache/torch-instrument`, or in `$XDG_CACHE_HOME`.

It holds the columns of traces that were read, captures that were fetched from URLs, and how fast this machine is. An
entry is a file or a folder that appears whole and vanishes whole, so that several processes may use the cache at once.
All entries together have 2 GiB at most, or the number of bytes in `INSTRUMENT_CACHE_BYTES` (0: nothing is kept); those
that were not used for longest go first. A fetched capture that was used in the last ten minutes stays, as a reader may
yet open its files.

The folder is used only if it is this user's own and no link, and no link in it is followed. Whatever fails here costs
time and nothing else: the functions that read and write raise OSError, which their callers ignore.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from instrument.errors import ConfigError
from instrument.files import (
    exists,
    folder_bytes,
    is_folder,
    open_regular,
    regular_files,
    replacing,
)

DEFAULT_BYTES = 2 << 30
BYTES_VARIABLE = "INSTRUMENT_CACHE_BYTES"
COLUMNS, FETCHED, RATES = "columns-", "fetched-", "machine.json"
# Only what is called like this is ever removed.
_ENTRY = re.compile(rf"({COLUMNS}|{FETCHED})[0-9a-f]{{32}}|{re.escape(RATES)}")
_UNFINISHED = re.compile(r"\.\w+\.tmp")
# A fetched capture stays so long after its last use; what is still unfinished after so long has been given up.
_IN_USE_S, _GIVEN_UP_S = 600, 3_600
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# Where versions before this one kept what they fetched, and what they called the columns beside a trace.
_OLD_FOLDER, _OLD_FETCHED, _OLD_COLUMNS = "instrument", re.compile("[0-9a-f]{32}"), ".columns"
_OLD_HEADS = (b'{"made_by":[', b'{"layout":["')
# Captures that the cache could not take, by their entry's name.
_temporary: dict[str, Path] = {}


class Entry(NamedTuple):
    """One entry: where it lies, its size in bytes, and when it was last used, in nanoseconds since 1970."""

    path: Path
    size: int
    used_ns: int


def location() -> Path:
    """Where the cache is, or would be.

    Raises:
        OSError: the user has no home.
    """
    return _base() / "torch-instrument"


def _base() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from None


def most_bytes() -> int:
    """How many bytes the entries may have together.

    Raises:
        ConfigError: `INSTRUMENT_CACHE_BYTES` is no number.
    """
    given = os.environ.get(BYTES_VARIABLE, "")
    if given and not re.fullmatch("[0-9]{1,18}", given):
        raise ConfigError(
            f"{BYTES_VARIABLE} is {given!r}: give a number of bytes, or 0 to keep nothing."
        )
    return int(given) if given else DEFAULT_BYTES


def open_entry(name: str) -> IO[bytes]:
    """Open a file that is kept, for reading, and note that it is used.

    Raises:
        OSError: there is none, or the cache cannot be used.
    """
    _check(location())
    file = open_regular(location() / name)
    _note_use(location() / name)
    return file


@contextmanager
def adding(name: str) -> Iterator[IO[bytes]]:
    """A file to write that becomes the entry of that name when all went well; others go where it becomes too much.

    Raises:
        OSError: the cache cannot be written.
    """
    with replacing(_writable() / name, mode=0o600) as file:
        yield file
    _keep_in_bounds()


def folder_of(name: str, fill: Callable[[Path], None]) -> Path:
    """The folder that is kept under a name; where it is missing, `fill` is called with an empty one.

    Where the cache cannot take it, it is a temporary folder, which is gone when this process ends.

    Raises:
        OSError: as `fill` does, or there is no room anywhere.
    """
    if (found := _folder(name)) is not None:
        return found
    try:
        kept = _writable() / name
        new = Path(tempfile.mkdtemp(dir=kept.parent, prefix=".", suffix=".tmp"))
    except OSError:
        return _temporary_folder(name, fill)
    try:
        fill(new)
        if exists(kept) and not is_folder(kept):
            kept.unlink()
        with suppress(OSError):  # another process was faster
            new.rename(kept)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    _keep_in_bounds()
    return _folder(name) or _temporary_folder(name, fill)


def _folder(name: str) -> Path | None:
    """The folder that is kept under a name, from now on in use; None where there is none."""
    with suppress(OSError):
        kept = location() / name
        _check(kept.parent)
        if is_folder(kept) and _note_use(kept):
            return kept
    return None


def _temporary_folder(name: str, fill: Callable[[Path], None]) -> Path:
    if name not in _temporary:
        folder = Path(tempfile.mkdtemp(prefix="torch-instrument-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        fill(folder)
        _temporary[name] = folder
    return _temporary[name]


def _check(folder: Path) -> os.stat_result:
    """Raise unless the cache's folder is there and can be trusted."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise OSError(errno.ENOTDIR, "is no folder, or a link, which is not followed", str(folder))
    if hasattr(os, "getuid") and about.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
    return about


def _writable() -> Path:
    """The cache's folder, made where it is missing, which nobody else may write.

    Raises:
        OSError: it cannot be used, is marked as read-only, or nothing is to be kept.
    """
    with suppress(ConfigError):
        if not most_bytes():
            raise PermissionError(errno.EPERM, f"{BYTES_VARIABLE} is 0")
    folder = location()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    mode = _check(folder).st_mode
    if not mode & stat.S_IWUSR:  # which does not stop root
        raise PermissionError(errno.EACCES, "is read-only", str(folder))
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(0o700)
    return folder


def _note_use(path: Path) -> bool:
    """Set an entry's time to now; gives whether it is there."""
    try:
        os.utime(path, follow_symlinks=os.utime not in os.supports_follow_symlinks)
    except FileNotFoundError:
        return False
    except OSError:  # a cache that is read-only
        pass
    return True


def entries() -> list[Entry]:
    """What is kept, the last used first.

    Raises:
        OSError: the cache cannot be used.
    """
    folder = location()
    if not exists(folder):
        return []
    _check(folder)
    found = [_entry(Path(each.path)) for each in os.scandir(folder) if _ENTRY.fullmatch(each.name)]
    return sorted(filter(None, found), key=lambda entry: entry.used_ns, reverse=True)


def _entry(path: Path) -> Entry | None:
    try:
        about = path.lstat()
        size = folder_bytes(path) if stat.S_ISDIR(about.st_mode) else about.st_size
        return Entry(path, size, about.st_mtime_ns)
    except OSError:  # removed by another process
        return None


def _keep_in_bounds() -> None:
    """Remove the entries that were not used for longest, and what was given up unfinished."""
    with suppress(OSError, ConfigError):
        left, now_ns = most_bytes(), time.time_ns()
        for entry in entries():
            left -= entry.size
            is_in_use = (
                entry.path.name.startswith(FETCHED) and now_ns - entry.used_ns < _IN_USE_S * 10**9
            )
            if left < 0 and not is_in_use:
                _remove(entry.path)
                left += entry.size
        _remove_unfinished()


def _remove_unfinished() -> None:
    for each in os.scandir(location()):
        with suppress(OSError):
            age_s = time.time() - each.stat(follow_symlinks=False).st_mtime
            if _UNFINISHED.fullmatch(each.name) and age_s > _GIVEN_UP_S:
                _remove(Path(each.path))


def _remove(path: Path) -> bool:
    """Remove a file, a link or a folder with what is in it, links in it unfollowed; gives whether it is gone."""
    with suppress(OSError):
        if is_folder(path):
            gone = path.with_name(
                f".{secrets.token_hex(6)}.tmp"
            )  # whoever looks sees all of it or nothing
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        else:
            path.unlink()
    return not exists(path)


def check_writable() -> None:
    """Raise OSError if nothing can be kept, with the reason."""
    with tempfile.TemporaryFile(dir=_writable()) as file:
        file.write(b"x" * 4096)


def clear() -> list[Entry]:
    """Remove every entry; gives those that are gone.

    Raises:
        OSError: the cache cannot be used.
    """
    gone = [entry for entry in entries() if _remove(entry.path)]
    with suppress(OSError):
        _remove_unfinished()
    return gone


def leftovers(below: Path | None = None) -> list[Path]:
    """What versions before this one have kept: fetched captures, and columns beside the traces at or below a path."""
    found: list[Path] = []
    with suppress(OSError):
        old = _base() / _OLD_FOLDER
        if is_folder(old):
            found += sorted(
                path
                for path in old.iterdir()
                if _OLD_FETCHED.fullmatch(path.name) and is_folder(path)
            )
    if below is not None:
        files = (
            regular_files(below)
            if below.is_dir()
            else [below, below.with_name(below.name + _OLD_COLUMNS)]
        )
        found += [file for file in files if file.name.endswith(_OLD_COLUMNS) and _is_columns(file)]
    return found


def _is_columns(path: Path) -> bool:
    """Whether a file begins as kept columns do: the length of a head, and the head, in JSON."""
    try:
        with open_regular(path) as file:
            head_bytes = int.from_bytes(file.read(8), "little")
            return 0 < head_bytes < path.lstat().st_size and file.read(12).startswith(_OLD_HEADS)
    except OSError:
        return False


def remove_leftovers(paths: list[Path]) -> list[Path]:
    """Remove what `leftovers` found; gives what is gone."""
    gone = [path for path in paths if _remove(path)]
    with suppress(OSError):  # something else is in it
        (_base() / _OLD_FOLDER).rmdir()
    return gone
