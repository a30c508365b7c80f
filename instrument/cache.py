"""The user's cache folder, `~/.cache/torch-instrument` or `$XDG_CACHE_HOME/torch-instrument`.

The cache holds the events of traces that were read before (as columns), captures that were fetched
from URLs, and the measured rates of this machine (FLOP/s and memory bandwidth). An entry is a file
or a folder. A new entry gets its name only when its content is complete, and an entry is removed in
one step, so several processes may use the cache at once. The total size of all entries is at most
2 GiB, or `INSTRUMENT_CACHE_BYTES` bytes; 0 turns the cache off. Above this limit, the least
recently used entries are removed. A fetched capture stays for ten minutes after its last use, even
above the limit, because a reader may still open its files.

The folder is used only if it belongs to this user and is not a link. Links in the folder are not
followed. If reading or writing the cache raises OSError, callers work without the cache.
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
from io import BufferedReader
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
# Only files and folders with these names are ever removed.
_ENTRY = re.compile(rf"({COLUMNS}|{FETCHED})[0-9a-f]{{32}}|{re.escape(RATES)}")
_UNFINISHED = re.compile(r"\.\w+\.tmp")
# In seconds: the time that a fetched capture stays after its last use, and the time that an
# unfinished entry stays after its last write.
_IN_USE_S, _UNFINISHED_S = 600, 3_600
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# Names that earlier versions of this package used: the folder and names of fetched captures, the
# suffix of a file with the columns of a trace, and how such a file begins after its first 8 bytes.
_OLD_FOLDER, _OLD_FETCHED, _OLD_COLUMNS = "instrument", re.compile("[0-9a-f]{32}"), ".columns"
_OLD_HEADS = (b'{"made_by":[', b'{"layout":["')
# Entries that the cache could not store: their temporary folders, by the name of the entry.
_temporary: dict[str, Path] = {}


class Entry(NamedTuple):
    """An entry of the cache. `size` is in bytes, `used_ns` in nanoseconds since 1970."""

    path: Path
    size: int
    used_ns: int


def location() -> Path:
    """The path of the cache's folder. The folder may be missing.

    Raises:
        OSError: the user has no home folder.
    """
    return _base() / "torch-instrument"


def _base() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(errno.ENOENT, str(error)) from None


def most_bytes() -> int:
    """The limit for the total size of all entries, in bytes.

    Raises:
        ConfigError: `INSTRUMENT_CACHE_BYTES` is not a number.
    """
    given = os.environ.get(BYTES_VARIABLE, "")
    if given and not re.fullmatch("[0-9]{1,18}", given):
        raise ConfigError(
            f"{BYTES_VARIABLE} is {given!r}: give a number of bytes, or 0 to keep nothing."
        )
    return int(given) if given else DEFAULT_BYTES


def open_entry(name: str) -> BufferedReader:
    """Open an entry for reading, and set its time of use to now. The entry must be a file.

    Raises:
        OSError: there is no such entry, or the cache cannot be used.
    """
    _check(location())
    file = open_regular(location() / name)
    _note_use(location() / name)
    return file


@contextmanager
def adding(name: str) -> Iterator[IO[bytes]]:
    """Open a new file for writing. If the `with` block succeeds, the file becomes the entry `name`.

    If the cache is then above its limit, the least recently used entries are removed.

    Raises:
        OSError: the cache cannot be written.
    """
    with replacing(_writable() / name, mode=0o600) as file:
        yield file
    _keep_in_bounds()


def folder_of(name: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder of the entry `name`. If the entry is missing, `fill` creates its content.

    `fill` is called with an empty folder. If the cache cannot store the folder, the result is a
    temporary folder, which is removed when this process ends.

    Raises:
        OSError: `fill` raised OSError, or the temporary folder cannot be created.
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
        with suppress(OSError):  # another process has added it
            new.rename(kept)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    _keep_in_bounds()
    return _folder(name) or _temporary_folder(name, fill)


def _folder(name: str) -> Path | None:
    """The entry `name` if it is a folder, else None. The entry's time of use becomes now."""
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
    """Raise OSError if the cache's folder is missing, is a link or belongs to another user."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise OSError(
            errno.ENOTDIR, "is not a folder, or is a link, which is not followed", str(folder)
        )
    if hasattr(os, "getuid") and about.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
    return about


def _writable() -> Path:
    """Return the cache's folder: create it if it is missing, and let only this user write to it.

    Raises:
        OSError: the folder cannot be used or is read-only, or `INSTRUMENT_CACHE_BYTES` is 0.
    """
    with suppress(ConfigError):
        if not most_bytes():
            raise PermissionError(errno.EPERM, f"{BYTES_VARIABLE}=0 turns the cache off")
    folder = location()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    mode = _check(folder).st_mode
    if not mode & stat.S_IWUSR:  # the system would let root write to a read-only folder
        raise PermissionError(errno.EACCES, "is read-only", str(folder))
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(0o700)
    return folder


def _note_use(path: Path) -> bool:
    """Set an entry's time of use to now; returns whether the entry exists."""
    try:
        os.utime(path, follow_symlinks=os.utime not in os.supports_follow_symlinks)
    except FileNotFoundError:
        return False
    except OSError:  # the cache is read-only
        pass
    return True


def entries() -> list[Entry]:
    """All entries, the most recently used first.

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
    """Remove entries above the limit of the cache, and old unfinished entries.

    The entries are examined one after the other, the most recently used first. An entry is removed
    if, with this entry, the size of all kept entries would exceed the limit. Fetched captures that
    were used in the last ten minutes are always kept, so the cache may still exceed the limit.
    """
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
            if _UNFINISHED.fullmatch(each.name) and age_s > _UNFINISHED_S:
                _remove(Path(each.path))


def _remove(path: Path) -> bool:
    """Remove a file, a link or a folder; return whether the path is gone. Follow no links."""
    with suppress(OSError):
        if is_folder(path):
            # The folder is renamed first, so that no process reads a partly removed entry.
            renamed = path.rename(path.with_name(f".{secrets.token_hex(6)}.tmp"))
            shutil.rmtree(renamed, ignore_errors=True)
        else:
            path.unlink()
    return not exists(path)


def check_writable() -> None:
    """Raise OSError, with the reason, if no entry can be added to the cache."""
    with tempfile.TemporaryFile(dir=_writable()) as file:
        file.write(b"x" * 4096)


def clear() -> list[Entry]:
    """Remove every entry; returns the entries that were removed.

    Raises:
        OSError: the cache cannot be used.
    """
    gone = [entry for entry in entries() if _remove(entry.path)]
    with suppress(OSError):
        _remove_unfinished()
    return gone


def leftovers(below: Path | None = None) -> list[Path]:
    """Find files and folders in which earlier versions cached data.

    Earlier versions stored fetched captures in a separate folder, and the columns of a trace in a
    file beside the trace. Files with columns are searched for only if `below` is given. If `below`
    is a folder, the search covers the folder and its subfolders. If `below` is a trace, only the
    file beside the trace is checked.
    """
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
    """Whether a file begins like the files in which earlier versions stored columns.

    Such a file begins with the length of a JSON header (8 bytes), followed by the header.
    """
    try:
        with open_regular(path) as file:
            head_bytes = int.from_bytes(file.read(8), "little")
            return 0 < head_bytes < path.lstat().st_size and file.read(12).startswith(_OLD_HEADS)
    except OSError:
        return False


def remove_leftovers(paths: list[Path]) -> list[Path]:
    """Remove files that `leftovers` found; returns the files that were removed."""
    gone = [path for path in paths if _remove(path)]
    with suppress(OSError):  # the folder holds other files
        (_base() / _OLD_FOLDER).rmdir()
    return gone
