"""Captures at URLs, such as `s3://bucket/run/NAME`, on any file system that fsspec supports.

The capture.json and the trace of a capture are fetched into the user's cache (`instrument.cache`)
and read from the cache. A file is fetched again only if it has changed at the URL. Small files,
such as the summaries of ranks, are fetched into memory.

The packages of fsspec read credentials and the server's address from environment variables. For S3,
the credentials are in `AWS_PROFILE`, or in `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`. The
address of a server that is not Amazon's is in `AWS_ENDPOINT_URL`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from instrument import cache
from instrument.errors import CaptureError, ConfigError, InstrumentError, MissingPackage
from instrument.files import is_regular
from instrument.redact import holds_password

# The names of the files that are fetched. The server cannot choose other names.
_METADATA, _TRACES = "capture.json", ("trace.json.gz", "trace.json")
# If the content of a file changes, these keys of fsspec's file information change; the most
# reliable key comes first.
_STATES = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
_MODIFIED = _STATES[3:]
_EXTRAS = {"s3fs": "s3"}


def is_url(place: object) -> TypeGuard[str]:
    """Whether `place`, which may be a path, is a URL."""
    return isinstance(place, str) and "://" in place


def check(url: str, option: str) -> None:
    """Check that a URL can be used with the installed packages; contacts no server.

    Args:
        url: the URL.
        option: the name of the option that holds the URL, for the error message.

    Raises:
        ConfigError: `url` is not a URL, holds a password or a query, or has an unknown protocol.
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
        ConfigError: the protocol is unknown.
        MissingPackage: the package for the protocol is not installed.
    """
    _check_protocol(url)
    import fsspec

    fs, path = fsspec.core.url_to_fs(url, **options)
    fs.invalidate_cache()  # listings can be out of date
    return fs, path.rstrip("/")


def captures(url: str) -> list[str]:
    """The URLs of the captures at or below a URL, the newest last; `url` itself if it is a file.

    Raises:
        CaptureError: there is no capture, or the server refuses access.
    """
    with _as_capture_error(url):
        fs, path = filesystem(url)
        found = _listed(fs, path)
        if path in found or f"{path}/{_METADATA}" in found:
            return [url]
        below = [
            name
            for name in found
            if name.endswith(f"/{_METADATA}") and "/." not in name[len(path) :]
        ]
        below.sort(key=lambda name: (_first(found[name], _MODIFIED), name))
        if not below:
            raise CaptureError(
                f"There is no capture at or below {url}: give the URL of a capture, or of a folder "
                "of captures."
            )
        return [url.rstrip("/") + name[len(path) : -len(_METADATA) - 1] for name in below]


def fetch(url: str) -> Path:
    """Fetch a capture or a file, and return the path of the local folder or file.

    Raises:
        CaptureError: there is nothing at the URL, the server refuses access, or the disk is full.
    """
    with _as_capture_error(url):
        fs, path = filesystem(url)
        if Path(path).name in ("", ".."):
            raise CaptureError(f"{url} names no capture: give the URL of a capture.")
        found = _listed(fs, path)
        if path in found:
            names = [path]
        elif f"{path}/{_METADATA}" in found:
            names = [name for file in (_METADATA, *_TRACES) if (name := f"{path}/{file}") in found]
            names = names[:2]  # if there are two traces, only the first is fetched
        else:
            raise CaptureError(f"There is no capture at {url}: it has no {_METADATA}.")
        states = [(name, found[name]["size"], _first(found[name], _STATES)) for name in names]
        key = hashlib.sha256(repr([url, states]).encode("utf-8", "surrogatepass")).hexdigest()[:32]
        fetched = cache.folder_of(cache.FETCHED + key, lambda folder: _get(fs, path, names, folder))
        return fetched / Path(path).name


def contents(urls: Sequence[str]) -> dict[str, bytes]:
    """Fetch files concurrently; return a mapping from the URL of each existing file to its bytes.

    All URLs must be on the same file system.

    Raises:
        CaptureError: the server refuses access.
    """
    with _as_capture_error(urls[0]):
        fs, _ = filesystem(urls[0])
        by_path = {fs._strip_protocol(url): url for url in urls}
        if _is_local(fs):
            by_path = {path: url for path, url in by_path.items() if is_regular(Path(path))}
        if not by_path:
            return {}
        # `cat` is not used, because it would read [1] in a name as a pattern
        data = fs.cat_ranges(list(by_path), None, None, on_error="return")
        return {url: each for url, each in zip(by_path.values(), data) if isinstance(each, bytes)}


def _listed(fs: Any, path: str) -> dict[str, dict[str, Any]]:
    """The files at or below a path, with fsspec's information about each file.

    The path itself may be a link. A file below it is left out if the relative path of the file
    contains a link, `.` or `..`.
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
    return "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)


def _first(about: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    value = next((about[key] for key in keys if about.get(key) is not None), "")
    return f"{value:020.6f}" if isinstance(value, float) else str(value)


def _get(fs: Any, path: str, names: list[str], folder: Path) -> None:
    """Fetch the file or capture at `path` into `folder`, under the same name.

    If `names` is `[path]`, `path` is a file. Otherwise `path` is the folder of a capture, and only
    the files in `names` are fetched.
    """
    target = folder / Path(path).name
    if names != [path]:
        target.mkdir()
    for name in names:
        fs.get_file(name, str(target if name == path else target / Path(name).name))


@contextmanager
def _as_capture_error(url: str) -> Iterator[None]:
    """Turn any exception of fsspec's packages into a CaptureError."""
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
