"""Captures at URLs, such as `s3://bucket/run/NAME`, on any file system that fsspec supports.

The capture.json and the trace of a capture are downloaded into a temporary folder, which is removed
when the process ends. A file is downloaded again only if it has changed at the URL. Small files,
such as the summaries of ranks, are read into memory. The packages of fsspec read credentials and
the server's address from environment variables, such as `AWS_PROFILE` and `AWS_ENDPOINT_URL`.

No file is downloaded beyond a limit: `MOST_METADATA_BYTES` for a capture.json, `MOST_TRACE_BYTES`
for a trace or a file of timings. The size that the server names is checked before the download, and
the download stops at the limit if this size is wrong or unknown.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar

from instrument.base.errors import CaptureError, ConfigError, InstrumentError, MissingPackage
from instrument.base.files import (
    DETAIL_FILE,
    METADATA_FILE,
    MOST_METADATA_BYTES,
    is_regular,
    regular_files,
)
from instrument.base.redact import holds_password
from instrument.base.units import size

_Content = TypeVar("_Content")

#: The limit for a trace at a URL. As plain JSON, 60 million events take about this size.
MOST_TRACE_BYTES = 16 << 30

#: The file that records where a capture was uploaded. The file itself is not uploaded.
NOTE_FILE = "upload.json"
# The names of the files that are fetched. The server cannot choose other names.
_TRACES = ("trace.json.gz", "trace.json")
# If the content of a file changes, these keys of fsspec's file information change; the most
# reliable key comes first.
_STATES = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
_MODIFIED = _STATES[3:]
_EXTRAS = {"s3fs": "s3"}
# How many bytes of a trace, and of a small file, are read at once.
_BLOCK, _SMALL_BLOCK = 8 << 20, 1 << 20
_SMALL_FILES_AT_ONCE = 32
# The copies that this process has downloaded, by the URL and the state of each file.
_downloaded: dict[tuple[Any, ...], Path] = {}


def is_url(place: object) -> TypeGuard[str]:
    """Whether `place`, which may be a path, is a URL."""
    return isinstance(place, str) and "://" in place


def check(url: str, option: str) -> None:
    """Check that the URL in `option` can be used with the installed packages; contacts no server.

    Raises:
        ConfigError: `url` is not a URL, holds a password or a query, is a chain of URLs, or has an
            unknown protocol.
        MissingPackage: the package for the protocol of the URL is not installed.
    """
    if not is_url(url):
        raise ConfigError(f"{option} is {url!r}, but it must be a URL such as s3://bucket/folder.")
    if holds_password(url):
        raise ConfigError(
            f"{option} is a URL with a password or a query (the text after `?`). This URL would be "
            "logged: put passwords and keys into profiler.upload_options."
        )
    _check_protocol(url)


def _check_protocol(url: str) -> None:
    if "::" in url:
        raise ConfigError(
            f"{url} is a chain of URLs for fsspec, which is not followed: give one URL such as "
            "s3://bucket/folder, without `::`."
        )
    protocol = url.partition("://")[0]
    try:
        import fsspec
    except ImportError:
        raise MissingPackage(f"A URL such as {protocol}://…", "fsspec", "upload") from None
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(
            f"The URL begins with {protocol}://, which fsspec does not know: use a URL such as "
            "s3://bucket/folder."
        ) from None
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or protocol
        what = f"A URL such as {protocol}://…"
        raise MissingPackage(what, package, _EXTRAS.get(package)) from None


def filesystem(url: str, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, created with `options`, and the URL's path on it.

    Raises:
        ConfigError: the protocol is unknown, or `url` is a chain such as zip://x::s3://bucket/y.
        MissingPackage: the package for the protocol is not installed.
    """
    _check_protocol(url)
    import fsspec

    fs, path = fsspec.core.url_to_fs(url, **options)
    fs.invalidate_cache()  # listings can be out of date
    return fs, path.rstrip("/")


def captures(url: str, *, or_traces: bool = False) -> list[str]:
    """The URLs of the captures at or below a URL, the newest last; `url` itself if it is a file.

    With `or_traces`, a folder without captures stands for the traces in it.

    Raises:
        CaptureError: there is no capture, or the server refuses access.
    """
    with _as_capture_error(url):
        fs, path = filesystem(url)
        found = _listed(fs, path)
        if path in found or f"{path}/{METADATA_FILE}" in found:
            return [url]
        below = [
            name
            for name in found
            if name.endswith(f"/{METADATA_FILE}") and "/." not in name[len(path) :]
        ]
        below.sort(key=lambda name: (_first(found[name], _MODIFIED), name))
        folders = [name[: -len(METADATA_FILE) - 1] for name in below]
        if or_traces and not folders:
            own = re.compile(re.escape(path) + r"/[^/.][^/]*\.json(\.gz)?")
            folders = sorted(filter(own.fullmatch, found))
        if not folders:
            raise CaptureError(
                f"There is no capture at or below {url}: give the URL of a capture, or of a folder "
                "of captures."
            )
        base = url.rstrip("/")
        if base.endswith(":"):  # the root, such as file:///
            return [fs.unstrip_protocol(folder) for folder in folders]
        return [base + folder[len(path) :] for folder in folders]


def fetch(url: str) -> Path:
    """Download a capture or a file, or reuse its copy; return the path of the local folder or file.

    The copy is removed when this process ends.

    Raises:
        CaptureError: there is nothing at the URL, the server refuses access, a file is larger than
            its limit, or the disk is full.
    """
    with _as_capture_error(url):
        fs, path = filesystem(url)
        if Path(path).name in ("", ".."):
            raise CaptureError(f"{url} names no capture: give the URL of a capture.")
        found = _listed(fs, path)
        if path in found:
            names = [path]
        elif f"{path}/{METADATA_FILE}" in found:
            names = [f"{path}/{file}" for file in (METADATA_FILE, *_TRACES)]
            # if there are two traces, only the first is fetched
            names = [name for name in names if name in found][:2]
            names += [name for name in (f"{path}/{DETAIL_FILE}",) if name in found]
        else:
            raise CaptureError(f"There is no capture at {url}: it has no {METADATA_FILE}.")
        sizes = {name: found[name].get("size") for name in names}
        state = (url, *((sizes[name], _first(found[name], _STATES)) for name in names))
        if state not in _downloaded:
            folder = Path(tempfile.mkdtemp(dir=_temporary_folder(os.getpid())))
            target = folder / Path(path).name
            try:
                if names != [path]:
                    target.mkdir()
                for name, named in sizes.items():
                    _download(fs, name, named, target if name == path else target / Path(name).name)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            _downloaded[state] = target
        return _downloaded[state]


def release(url: str) -> None:
    """Remove the copies of a capture or a file, so that thousands do not fill the disk."""
    for state in [state for state in _downloaded if state[0] == url]:
        shutil.rmtree(_downloaded.pop(state).parent, ignore_errors=True)


def sizes(url: str) -> dict[str, int]:
    """The URLs and sizes of the files directly in a folder; raises CaptureError as `captures`."""
    with _as_capture_error(url):
        fs, path = filesystem(url)
        return {
            f"{url.rstrip('/')}/{each['name'].rpartition('/')[2]}": each["size"]
            for each in fs.ls(path, detail=True)
            if each["type"] == "file"
        }


def contents(
    urls: Sequence[str],
    decode: Callable[[bytes], _Content],
    most: int = MOST_METADATA_BYTES,
    last: int | None = None,
) -> dict[str, _Content]:
    """Read small files of one file system concurrently; return what `decode` makes of each, by URL.

    A file is left out if it does not exist, cannot be read, or has more than `most` bytes. Files of
    more than 1 MiB are read one after the other, so that few of them are in memory at once. With
    `last`, only so many bytes of the end of each file are read.

    Raises:
        CaptureError: the server refuses access.
    """
    with _as_capture_error(urls[0]):
        fs, _ = filesystem(urls[0])
        by_path = {fs._strip_protocol(url): url for url in urls}
        if _is_local(fs):
            by_path = {path: url for path, url in by_path.items() if is_regular(Path(path))}
    one_large_file = Lock()

    def read(path: str) -> tuple[_Content, ...]:
        with ExitStack() as held:
            blocks: list[bytes] = []
            try:
                if last is not None:
                    return (decode(fs.tail(path, last)),)
                for block in _blocks(fs, path, most, _SMALL_BLOCK):
                    if len(blocks) == 1:
                        held.enter_context(one_large_file)
                    blocks.append(block)
            except Exception:  # any exception of fsspec's packages
                return ()
            return (decode(b"".join(blocks)),)

    with ThreadPoolExecutor(_SMALL_FILES_AT_ONCE) as pool:
        found = zip(by_path.values(), pool.map(read, by_path))
        return {url: content for url, contents in found for content in contents}


def _blocks(
    fs: Any, path: str, most: int, block_bytes: int, named: int | None = None
) -> Iterator[bytes]:
    """Yield the content of a file in blocks; `named` is its size, None if not known."""
    too_large = CaptureError(
        f"{fs.unstrip_protocol(path)} has more than {size(most)}, so it is not downloaded: copy "
        "the trace to this machine, and give its path."
    )
    # Of an HTTP server, fsspec's buffered files request parts, which some servers do not offer.
    block_size = 0 if "http" in _protocols(fs) else block_bytes
    with fs.open(path, "rb", block_size=block_size) as file:
        if (named or getattr(file, "size", None) or 0) > most:
            raise too_large
        while block := file.read(block_bytes):
            most -= len(block)
            if most < 0:
                raise too_large
            yield block


def _download(fs: Any, path: str, named: int | None, target: Path) -> None:
    """Copy a file; `named` is its size according to the server, None if not known."""
    most = MOST_METADATA_BYTES if Path(path).name == METADATA_FILE else MOST_TRACE_BYTES
    free = shutil.disk_usage(target.parent).free
    if free < (named or 0) <= most:
        raise CaptureError(
            f"{fs.unstrip_protocol(path)} has {size(named or 0)}, but {tempfile.gettempdir()} has "
            f"room for {size(free)}: set TMPDIR to a folder with more room."
        )
    written = 0
    with target.open("xb") as file:
        for block in _blocks(fs, path, min(most, free), _BLOCK, named):
            written += file.write(block)
            if named is not None and written > named:
                break
    if named is not None and written != named:
        raise CaptureError(
            f"{fs.unstrip_protocol(path)} does not have the {size(named)} that the server names: "
            "download it again."
        )


@cache
def _temporary_folder(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="torch-instrument-"))
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked process may run the same function
        shutil.rmtree(folder, ignore_errors=True)


def _listed(fs: Any, path: str) -> dict[str, dict[str, Any]]:
    """The files at or below a path, with fsspec's information about each file.

    The path itself may be a link. Files that are reached by a link, `.` or `..` below it are left
    out.
    """
    about = fs.info(path)
    if about["type"] == "file":
        return {path: about}
    return {
        name: about
        for name, about in fs.find(path, detail=True).items()
        if about["type"] == "file" and _is_below(fs, path, name)
    }


def _is_below(fs: Any, path: str, name: str) -> bool:
    relative = name.removeprefix(f"{path}/")
    if relative == name or {"..", "."} & {*relative.split("/")}:
        return False
    return not _is_local(fs) or Path(name).resolve() == Path(path).resolve() / relative


def _is_local(fs: Any) -> bool:
    return "file" in _protocols(fs)


def _protocols(fs: Any) -> Sequence[str]:
    return [fs.protocol] if isinstance(fs.protocol, str) else fs.protocol


def _first(about: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    value = next((about[key] for key in keys if about.get(key) is not None), "")
    return f"{value:020.6f}" if isinstance(value, float) else str(value)


@contextmanager
def _as_capture_error(url: str) -> Iterator[None]:
    try:
        yield
    except InstrumentError:
        raise
    except FileNotFoundError:
        raise CaptureError(
            f"There is nothing at {url}: give the URL of a capture, a trace or a folder of "
            "captures."
        ) from None
    except Exception as error:
        hint = "check that the server can be reached and that the disk has room"
        if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
            hint = (
                "set credentials with read access in the environment, for example AWS_PROFILE "
                "or AWS_ACCESS_KEY_ID"
            )
        raise CaptureError(f"{url} cannot be read ({str(error).rstrip('.')}): {hint}.") from None


def files_of(folder: Path) -> list[str]:
    """List the files that an upload of a capture sends, with capture.json last.

    So if a capture at a URL has a capture.json, all other files have arrived too. Hidden files,
    links, and the file that records the upload are left out.
    """
    relative = (file.relative_to(folder) for file in regular_files(folder))
    found = [
        each.as_posix() for each in relative if not any(part.startswith(".") for part in each.parts)
    ]
    kept = (file for file in found if file != NOTE_FILE)
    return sorted(kept, key=lambda file: (file == METADATA_FILE, file))
