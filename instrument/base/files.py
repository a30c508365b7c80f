"""Reads and writes whole files, and follows no symbolic links.

A capture folder may come from anybody. Only regular files are read: a link could expose another
file of the user, and a pipe could block the reader. If there is a link at the path of a file to
write, the file replaces the link.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

#: The environment variable with a folder for captures, which replaces `profiler.output_dir`.
CAPTURES_VARIABLE = "INSTRUMENT_DIR"
#: The environment variable with the file into which a process writes what work it did; see
#: `record.work`.
WORK_VARIABLE = "INSTRUMENT_WORK"
#: The environment variable with the socket on which `instrument try` listens; see `record.trial`.
TRIAL_VARIABLE = "INSTRUMENT_TRIAL"
#: The environment variable with the changes, as `--with` names them, whose variables are set.
CHANGES_VARIABLE = "INSTRUMENT_WITH"

#: The file of a capture that describes the run and the window.
METADATA_FILE = "capture.json"
#: The file of a capture with the trace of its detail window.
DETAIL_FILE = "detail.json.gz"
#: The format of capture.json.
FORMAT = 2
#: The format of a line of a timings file. A line without the field `format` has format 1.
TIMINGS_FORMAT = 1
#: The format of the file with the lines of a run.
LINES_FORMAT = 1

#: Matches the names of all files with memory categories.
MEMORY_CATEGORIES_FILES = "memory_categories_*"

# The limit for a metadata file (capture.json, …). Such files have a few kilobytes.
MOST_METADATA_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20

# Without this flag, opening a pipe that nobody writes to would block.
_NO_WAIT = os.O_NONBLOCK


def is_regular(path: Path) -> bool:
    """Whether `path` is a regular file, not a link, pipe, device or folder."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):  # ValueError: a null character in the path
        return False


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder and not a link to a folder."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether `path` exists; True for a broken link too."""
    return os.path.lexists(path)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: the file does not exist, cannot be read, or is a symbolic link, a pipe, a device or
            a folder.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | _NO_WAIT | os.O_CLOEXEC)
    except OSError as error:
        raise _sentence(error, path) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most: int = MOST_METADATA_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        OSError: as for `open_regular`, or the file is larger than `most` bytes.
    """
    content = bytearray()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            content += chunk
            if len(content) > most:
                raise OSError(errno.EFBIG, f"is larger than {most:,} bytes", str(path))
    return bytes(content)


@contextmanager
def replacing(target: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a new file, which replaces `target` if the `with` block succeeds.

    If the block fails, the new file is removed and `target` stays. If `target` is a link, the link
    itself is replaced. Until the end of the block, the new file is `.NAME.tmp` in the folder of
    `target`; NAME is random. The permissions of the file are `mode` without the bits of the umask.

    Raises:
        OSError: the file cannot be written; or `target` is a pipe, a socket or a device, or a link
            to one, such as `/dev/stdout`. As root, a file would replace the device for all users.
    """
    if _is_special(target):
        raise OSError(errno.EINVAL, "is a pipe, a socket or a device, not a file", str(target))
    beside = target.with_name(f".{secrets.token_hex(6)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(beside, flags, mode), "wb") as raw:
            yield raw
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    """Whether `path` leads to a pipe, a socket, a device, or an open file of a process."""
    try:
        mode = path.stat().st_mode
        opened = path.is_symlink() and path.readlink().is_relative_to("/proc")
    except OSError:  # missing, or a broken link
        return False
    return opened or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def open_to_append(target: Path, buffering: int = -1) -> IO[bytes]:
    """Open a file to read and append; create it if it is missing.

    Raises:
        OSError: the file cannot be written, is not a regular file, or has another hard link.
    """
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | _NO_WAIT
        handle = os.open(target, flags, 0o666)
    except OSError as error:
        raise _sentence(error, target) from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file, or has another hard link", str(target))
    return os.fdopen(handle, "a+b", buffering)


def _sentence(error: OSError, path: Path) -> OSError:
    """Return the error; if its cause is a symbolic link, return an error that says so."""
    if error.errno in (errno.ELOOP, errno.EMLINK):
        return OSError(error.errno, "is a symbolic link, which is not followed", str(path))
    return error


def write(target: Path, content: str | bytes) -> None:
    """Write a file at `target`. If `target` exists, the file replaces it; links are not followed.

    Text is written as UTF-8, with `?` for lone surrogates.
    """
    with replacing(target) as raw:
        raw.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)


def make_folder(base: Path, *names: str) -> Path:
    """Return the folder `base/names…`; create it if it is missing. Only `base` may be a link.

    Raises:
        OSError: a part below `base` is a link or a file, or cannot be created.
    """
    base.mkdir(parents=True, exist_ok=True)
    for name in names:
        base = base / name
        try:
            base.mkdir()
        except FileExistsError:
            if not is_folder(base):
                what = "is not a folder, or is a link, which is not followed"
                raise OSError(errno.ENOTDIR, what, str(base)) from None
    return base


def fill_standard_streams() -> None:
    """Open /dev/null as each of stdin, stdout and stderr that is closed.

    Otherwise a file that is opened later gets the number of the stream, and so what torch prints.
    """
    with suppress(OSError):
        while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(handle)


def encodable(value: Any) -> Any:
    """Return a JSON value in which lone surrogates are replaced by their escapes.

    Python decodes an argument or a path that is not UTF-8 to lone surrogates. JSON readers refuse
    lone surrogates.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return [encodable(item) for item in value] if isinstance(value, list | tuple) else value


def lines_file(rank: int) -> str:
    """The name of the file in the folder of a run that holds the lines which a rank executed."""
    return f"lines_rank{rank}.json"


def memory_categories_file(device: str, *, raw: bool = False) -> str:
    """The name of the file in a capture that holds a device's memory categories over time.

    With `raw`, the name of the file that holds each allocation and free of the device.
    """
    return f"memory_categories_{device.replace(':', '-')}{'.raw.json.gz' if raw else '.json'}"


def python_running(module: str, *arguments: str) -> list[str]:
    """The command that runs `main()` of a module of this package in a new interpreter.

    The new interpreter has the places of `sys.path` after its own. So it finds this package and its
    dependencies where they are installed, although the script's folder may hold files of the same
    names. Run it without PYTHONPATH.
    """
    package = str(Path(__file__).parents[2])
    places = [str(place) or os.curdir for place in sys.path]
    code = (
        f"import sys; sys.path.insert(0, {package!r}); import instrument; del sys.path[0]; "
        f"sys.path += {places!r}; from {module} import main; main()"
    )
    return [sys.executable, "-P", "-c", code, *arguments]


@contextmanager
def importable_here() -> Iterator[None]:
    """Append the current folder to `sys.path` within the block."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def folder_bytes(folder: Path | str) -> int:
    """The total bytes of the regular files in a folder and its subfolders; links are skipped."""
    size = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # removed by another process
                if entry.is_dir(follow_symlinks=False):
                    size += folder_bytes(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    size += entry.stat(follow_symlinks=False).st_size
    return size


def regular_files(folder: Path) -> list[Path]:
    """The regular files in a folder and its subfolders, sorted; links are skipped."""
    found = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
    return sorted(file for file in found if is_regular(file))
