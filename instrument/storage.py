"""Captures at URLs, such as `s3://bucket/run/NAME`: on every file system that fsspec knows.

What a reader needs of one, its capture.json and its trace, is fetched into the user's cache (`instrument.cache`) and
read from there; again only when it has changed. Credentials and servers are settings of fsspec's packages, in the
environment: for S3 `AWS_PROFILE` or `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, and `AWS_ENDPOINT_URL` for a
server of one's own.
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

# What is read of a capture; nothing is fetched under a name that somebody else chose.
_METADATA, _TRACES = "capture.json", ("trace.json.gz", "trace.json")
# How file systems call what changes with a file's content, the best first.
_STATES = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
_MODIFIED = _STATES[3:]
_EXTRAS = {"s3fs": "s3"}


def is_url(place: object) -> TypeGuard[str]:
    """Whether a place is given by URL."""
    return isinstance(place, str) and "://" in place


def check(url: str, option: str) -> None:
    """See that a URL can be written to with the packages at hand; no server is asked.

    Raises:
        ConfigError: it is no URL, holds a password, or no such protocol is known.
        MissingPackage: the package for its protocol is not installed.
    """
    if not is_url(url):
        raise ConfigError(f"{option} is {url!r}, but it must be a URL such as s3://bucket/folder.")
    if holds_password(url):
        raise ConfigError(
            f"{option} holds a password or a query, which would be logged: give it in profiler.upload_options."
        )
    _check_protocol(url)


def _check_protocol(url: str) -> None:
    protocol = url.partition("://")[0]
    try:
        import fsspec
    except ImportError:
        raise MissingPackage(f"A place such as {protocol}://…", "fsspec", "upload") from None
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(
            f"A URL begins with {protocol}://, which fsspec does not know: give one such as s3://bucket/folder."
        ) from None
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or protocol
        raise MissingPackage(
            f"A place such as {protocol}://…", package, _EXTRAS.get(package)
        ) from None


def filesystem(url: str, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[Any, str]:
    """The file system of a URL, built with fsspec's `options`, and the path on it.

    Raises:
        ConfigError: no such protocol is known.
        MissingPackage: the package for it is not installed.
    """
    _check_protocol(url)
    import fsspec

    fs, path = fsspec.core.url_to_fs(url, **options)
    fs.invalidate_cache()  # what it remembers of folders
    return fs, path.rstrip("/")


def captures(url: str) -> list[str]:
    """The URLs of the captures at or below a URL, the newest last; a trace file counts as one.

    Raises:
        CaptureError: there are none, or the server does not give them.
    """
    with _told(url):
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
                f"There is no capture at or below {url}: give its URL, or that of a folder above it."
            )
        return [url.rstrip("/") + name[len(path) : -len(_METADATA) - 1] for name in below]


def fetch(url: str) -> Path:
    """Bring one capture, or one file, here; gives the folder or file that holds it.

    Raises:
        CaptureError: it does not exist, the server does not give it, or the disk does not take it.
    """
    with _told(url):
        fs, path = filesystem(url)
        if Path(path).name in ("", ".."):
            raise CaptureError(f"{url} names no capture: give the URL of one.")
        found = _listed(fs, path)
        wanted = (
            [path]
            if path in found
            else [f"{path}/{_METADATA}", *(f"{path}/{name}" for name in _TRACES)]
        )
        here = [name for name in wanted if name in found][:2]
        if path not in found and wanted[0] not in found:
            raise CaptureError(f"There is no capture at {url}: it has no {_METADATA}.")
        state = repr(
            [url, [(name, found[name]["size"], _first(found[name], _STATES)) for name in here]]
        )
        entry = (
            cache.FETCHED + hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        )
        return cache.folder_of(entry, lambda folder: _get(fs, path, here, folder)) / Path(path).name


def contents(urls: Sequence[str]) -> dict[str, bytes]:
    """What is in those files that are there, of one file system, asked for all at once where it can be.

    Raises:
        CaptureError: the server does not give them.
    """
    with _told(urls[0]):
        fs, _ = filesystem(urls[0])
        by_path = {fs._strip_protocol(url): url for url in urls}
        if _is_local(fs):
            by_path = {path: url for path, url in by_path.items() if is_regular(Path(path))}
        if not by_path:
            return {}
        data = fs.cat_ranges(
            list(by_path), None, None, on_error="return"
        )  # `cat` takes [1] in a name for a pattern
        return {url: each for url, each in zip(by_path.values(), data) if isinstance(each, bytes)}


def _listed(fs: Any, path: str) -> dict[str, dict[str, Any]]:
    """Every file at or below a path, with what the file system tells of it; a path itself may be a link.

    Of a listing nothing is taken that lies elsewhere: what a link below the path leads to, or a name with `..` in it.
    """
    about = fs.info(path)
    if about["type"] == "file":
        return {path: about}
    found = {
        name: about for name, about in fs.find(path, detail=True).items() if about["type"] == "file"
    }
    return {name: about for name, about in found.items() if _is_below(fs, path, name)}


def _is_below(fs: Any, path: str, name: str) -> bool:
    inner = name.removeprefix(f"{path}/")
    if inner == name or {"..", "."} & {*inner.split("/")}:
        return False
    return not _is_local(fs) or Path(name).resolve() == Path(path).resolve() / inner


def _is_local(fs: Any) -> bool:
    return "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)


def _first(about: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    value = next((about[key] for key in keys if about.get(key) is not None), "")
    return f"{value:020.6f}" if isinstance(value, float) else str(value)


def _get(fs: Any, path: str, names: list[str], folder: Path) -> None:
    """Fetch files into a folder: one that is the path itself by its name, others into a folder of the path's name."""
    place = folder / Path(path).name
    if names != [path]:
        place.mkdir()
    for name in names:
        fs.get_file(name, str(place if name == path else place / Path(name).name))


@contextmanager
def _told(url: str) -> Iterator[None]:
    """What the packages behind fsspec raise, each of them in its own way, as one sentence."""
    try:
        yield
    except InstrumentError:
        raise
    except FileNotFoundError:
        raise CaptureError(
            f"There is nothing at {url}: give the URL of a capture, a trace or a folder above."
        ) from None
    except Exception as error:
        refused = isinstance(error, PermissionError) or "Credential" in type(error).__name__
        hint = (
            "set credentials that may read it in the environment, as AWS_PROFILE or AWS_ACCESS_KEY_ID"
            if refused
            else "see whether the server can be reached, and the disk has room"
        )
        raise CaptureError(f"{url} cannot be read ({str(error).rstrip('.')}): {hint}.") from None
