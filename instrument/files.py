"""Reading and writing files: whole or not at all, and never through a symbolic link.

A capture folder may come from anybody. What lies in it is read only where it is a regular file, so that a link cannot
show or send another file of the user's, and a pipe cannot hang the reader. What is written takes the place of a link
instead of following it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

# What a file of metadata (capture.json, summary.json, upload.json) may hold; ours take kilobytes.
MOST_METADATA_BYTES = 64 << 20

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(
    os, "O_NONBLOCK", 0
)  # opening a pipe that nobody writes into would wait for ever


def is_regular(path: Path) -> bool:
    """Whether there is a regular file at `path` itself, and no link, pipe, device or folder."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder at `path` itself, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether there is anything at `path`, a link that leads nowhere too."""
    return os.path.lexists(path)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        OSError: it does not exist, cannot be read, or is a symbolic link, a pipe, a device or a folder.
    """
    try:
        handle = os.open(path, os.O_RDONLY | _NO_LINK | _NO_WAIT | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise _sentence(error, path) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode) or (not _NO_LINK and path.is_symlink()):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, most: int = MOST_METADATA_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        OSError: as for `open_regular`, or the file is larger.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most:,} bytes", str(path))
    return content


@contextmanager
def replacing(target: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `target` when all went well, and is gone when not.

    A link at `target` is replaced and not followed. The temporary file lies beside it and is called `.*.tmp`. `mode`
    is what the file allows, less what the process's umask takes away.
    """
    beside = target.with_name(f".{secrets.token_hex(6)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
    try:
        with os.fdopen(os.open(beside, flags, mode), "wb") as raw:
            yield raw
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def open_to_append(target: Path, buffering: int = -1) -> IO[bytes]:
    """Open a file for reading, and for writing at its end; it is made where it is missing.

    Raises:
        OSError: it cannot be written, or is a symbolic link, no regular file, or a file that has another name too.
    """
    try:
        handle = os.open(target, os.O_RDWR | os.O_APPEND | os.O_CREAT | _NO_LINK | _NO_WAIT, 0o666)
    except OSError as error:
        raise _sentence(error, target) from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        raise OSError(
            errno.EINVAL, "is no regular file of one name, which alone is written on", str(target)
        )
    return os.fdopen(handle, "a+b", buffering)


def _sentence(error: OSError, path: Path) -> OSError:
    linked = error.errno in (errno.ELOOP, errno.EMLINK)
    return (
        OSError(error.errno, "is a symbolic link, which is not followed", str(path))
        if linked
        else error
    )


def write(target: Path, content: str | bytes) -> None:
    """Write a whole file, as `replacing` does; text as UTF-8, with `?` for halves of characters."""
    with replacing(target) as raw:
        raw.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)


def make_folder(base: Path, *names: str) -> Path:
    """The folder `base/names…`, made where it is missing; `base` may be a link, what lies below it may not.

    Raises:
        OSError: a part of it below `base` is a link or a file, or cannot be made.
    """
    base.mkdir(parents=True, exist_ok=True)
    for name in names:
        base = base / name
        try:
            base.mkdir()
        except FileExistsError:
            if not is_folder(base):
                raise OSError(
                    errno.ENOTDIR,
                    "is no folder, or a link to one, which is not followed",
                    str(base),
                ) from None
    return base


def state_folder() -> Path:
    """Where this user's state is kept from run to run: `~/.local/state/torch-instrument`, or in `XDG_STATE_HOME`.

    Raises:
        RuntimeError: the user has no home.
    """
    return (
        Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        / "torch-instrument"
    )


def encodable(value: Any) -> Any:
    """A value as JSON holds it, with the number of each half of a character in its place.

    Arguments and paths that are no UTF-8 reach Python with such halves, and no JSON reader takes them.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return [encodable(item) for item in value] if isinstance(value, list | tuple) else value


def python_running(module: str, *arguments: str) -> list[str]:
    """A command that runs `main()` of a module in another interpreter.

    Unlike `python -m` it imports nothing from the current folder, which may be somebody's download.
    """
    code = (
        f"import sys; sys.path[:1] = filter(None, sys.path[:1]); from {module} import main; main()"
    )
    return [sys.executable, "-c", code, *arguments]


@contextmanager
def importable_here() -> Iterator[None]:
    """Let modules that lie in the current folder be imported within the block, if nothing else bears their name."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def folder_bytes(folder: Path | str) -> int:
    """The bytes of the regular files in a folder and below it; no link is followed."""
    size = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # removed meanwhile
                if entry.is_dir(follow_symlinks=False):
                    size += folder_bytes(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    size += entry.stat(follow_symlinks=False).st_size
    return size


def regular_files(folder: Path) -> list[Path]:
    """The regular files in a folder and below it, sorted; links are left out, and folders behind links."""
    found = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
    return sorted(file for file in found if is_regular(file))
