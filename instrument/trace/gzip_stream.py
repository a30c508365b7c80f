"""A file's plain bytes in pieces, inflated where it is gzip."""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from instrument.errors import TraceError

CHUNK_BYTES = 1 << 20
CHUNKS_AHEAD = 3
# Real traces shrink to between a tenth and a sixtieth, deflate itself ends at 1032: in between lies what is no trace.
MAX_RATIO = 200
RATIO_COUNTS_FROM_BYTES = 32 << 20
RATIO_VARIABLE = "INSTRUMENT_MAX_INFLATION"


def chunks(path: Path) -> Iterator[bytes]:
    """The plain bytes of a file in order, at most 1 MiB at a time; gzip is told by its first bytes, not by its name.

    Inflates with isal or zlib-ng where one is installed, else with the standard library. A file that has inflated to
    over 32 MiB, and to over 200 times what was read of it, is refused; INSTRUMENT_MAX_INFLATION sets another ratio.

    Raises:
        TraceError: the file is missing, cannot be read, is damaged gzip, or inflates too far.
        EOFError: after the last bytes that there are, where gzip is cut short.
    """
    try:
        with path.open("rb") as file:
            first = file.read(CHUNK_BYTES)
            if first and b"\x1f\x8b".startswith(first[:2]):
                yield from _inflated(path, file, first)
                return
            while first:
                yield first
                first = file.read(CHUNK_BYTES)
    except FileNotFoundError:
        raise TraceError(f"The trace file {path} does not exist; check the path.") from None
    except OSError as error:
        raise TraceError(
            f"The trace file {path} cannot be read: {error.strerror or error}."
        ) from None


def ahead(source: Iterator[bytes]) -> Generator[bytes, None, None]:
    """The same bytes, got by a thread while earlier ones are worked on: reading and inflating leave Python's lock."""
    with ThreadPoolExecutor(1) as thread:
        try:
            coming = deque(thread.submit(next, source, b"") for _ in range(CHUNKS_AHEAD))
        except RuntimeError:  # the interpreter ends, and no thread can be started any more
            yield from source
            return
        while chunk := coming.popleft().result():
            coming.append(thread.submit(next, source, b""))
            yield chunk


def _inflated(path: Path, file: IO[bytes], packed: bytes) -> Iterator[bytes]:
    zlib = _fastest()
    most = _max_ratio()
    stream, size, taken = zlib.decompressobj(31), 0, 0
    while packed:
        try:
            plain = stream.decompress(packed, CHUNK_BYTES)
        except zlib.error as error:
            raise TraceError(
                f"The trace file {path} is damaged gzip ({error}); copy or record it again."
            ) from None
        size += len(plain)
        taken += len(packed) - len(stream.unconsumed_tail) - len(stream.unused_data)
        if size > max(RATIO_COUNTS_FROM_BYTES, most * taken):
            raise TraceError(
                f"The trace file {path} inflates its first {taken} bytes to {size}, over {most:g} times as much, as no "
                f"trace does; if you trust it, set {RATIO_VARIABLE} higher."
            )
        if plain:
            yield plain
        if stream.eof:  # another member may follow, or zeros that pad the file
            packed = (stream.unused_data or file.read(CHUNK_BYTES)).lstrip(b"\0")
            stream = zlib.decompressobj(31) if packed else stream
        else:
            packed = stream.unconsumed_tail or (
                b"" if plain and len(plain) == CHUNK_BYTES else file.read(CHUNK_BYTES)
            )
            if (
                not packed and len(plain) == CHUNK_BYTES
            ):  # all is taken in, and more may still come out
                packed = file.read(CHUNK_BYTES)
    if not stream.eof:
        raise EOFError


def _fastest() -> Any:
    for name in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module("zlib")


def _max_ratio() -> float:
    given = os.environ.get(RATIO_VARIABLE, "")
    try:
        return float(given) if given else MAX_RATIO
    except ValueError:
        raise TraceError(
            f"{RATIO_VARIABLE} is {given!r}; give a number such as {MAX_RATIO}."
        ) from None
