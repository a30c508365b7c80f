"""The bytes of a file in chunks, decompressed if it is gzip."""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO, Any

from instrument.base.errors import TraceError

CHUNK_BYTES = 1 << 20
CHUNKS_AHEAD = 3
# Traces compress by a factor of 10 to 60, and the deflate format allows at most 1032. A file with a
# factor over `MAX_RATIO` is not a trace, and its content could fill the memory.
MAX_RATIO = 200
RATIO_COUNTS_FROM_BYTES = 32 << 20


def chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed if it is gzip, in chunks of at most 1 MiB.

    isal or zlib-ng decompresses the file if one of them is installed, else the standard library. A
    file is refused when its decompressed bytes exceed both 32 MiB and 200 times
    the compressed bytes read so far.

    Raises:
        TraceError: the file is missing, cannot be read, is damaged gzip, or exceeds the ratio.
        EOFError: after the last bytes, if the gzip data is truncated.
    """
    with _with_reason(path), path.open("rb") as file:
        first = file.read(CHUNK_BYTES)
        if _is_gzip(first):
            yield from _inflated(path, file, first)
            return
        while first:
            yield first
            first = file.read(CHUNK_BYTES)


class Source:
    """The bytes of a file, decompressed if it is gzip, for a caller that reads them piece by piece.

    A thread decompresses ahead of the caller. The caller's thread reads plain files, because that
    costs less than passing bytes from one core to another.

    Attributes:
        threads: how many threads work beside the caller's.
        cut_short: whether the gzip data ends too early; known only after all bytes before that end.
    """

    def __init__(self, path: Path) -> None:
        self.cut_short = False
        self._path, self._plain = path, _opened_if_plain(path)
        self.threads = 1 if self._plain is None else 0
        self._chunks = ahead(chunks(path))  # not used for a plain file
        self._rest = memoryview(b"")  # the rest of the chunk that was read last

    def after(self, rest: memoryview, size: int) -> bytes:
        """Return `rest` (the end of what was read) and up to `size` bytes that follow it.

        If the result is only `rest`, the file has ended.

        Raises:
            TraceError: see `chunks`.
        """
        if self._plain is None:
            return b"".join([rest, *self._next(size)])
        with _with_reason(self._path):
            self._plain.seek(-len(rest), os.SEEK_CUR)  # to read again is faster than to join
            return self._plain.read(len(rest) + size)

    def unread(self, text: bytes) -> None:
        """Go back before `text`, the end of what was read."""
        if self._plain is not None:
            self._plain.seek(-len(text), os.SEEK_CUR)
        else:
            self._rest = memoryview(b"".join((text, self._rest)))

    def _next(self, size: int) -> Iterator[memoryview]:
        while size > 0:
            try:
                chunk = self._rest or memoryview(next(self._chunks, b""))
            except EOFError:
                chunk, self.cut_short = memoryview(b""), True
            if not chunk:
                return
            yield chunk[:size]
            self._rest = chunk[size:]
            size -= len(chunk)

    def close(self) -> None:
        """Close the file, and end the thread."""
        if self._plain is not None:
            self._plain.close()
        self._chunks.close()


def _opened_if_plain(path: Path) -> FileIO | None:
    """Open a regular file without a buffer; None if it is gzip, or no regular file."""
    with _with_reason(path):
        if not path.is_file():
            return None
        file = path.open("rb", buffering=0)
        if _is_gzip(file.read(2)):
            file.close()
            return None
        file.seek(0)
        return file


@contextmanager
def _with_reason(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise TraceError(f"The trace file {path} does not exist; check the path.") from None
    except OSError as error:
        raise TraceError(
            f"The trace file {path} cannot be read: {error.strerror or error}."
        ) from None


def _is_gzip(first: bytes) -> bool:
    return first != b"" and b"\x1f\x8b".startswith(first[:2])


def ahead(source: Iterator[bytes]) -> Generator[bytes, None, None]:
    """Yield the chunks of `source`, which a thread reads while the caller works.

    Reading and decompressing release the GIL.
    """
    with ThreadPoolExecutor(1) as thread:
        try:
            pending = deque(thread.submit(next, source, b"") for _ in range(CHUNKS_AHEAD))
        except RuntimeError:  # no thread can start while the interpreter shuts down
            yield from source
            return
        while chunk := pending.popleft().result():
            pending.append(thread.submit(next, source, b""))
            yield chunk


def _inflated(path: Path, file: IO[bytes], packed: bytes) -> Iterator[bytes]:
    zlib = _fastest()
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
        if size > max(RATIO_COUNTS_FROM_BYTES, MAX_RATIO * taken):
            raise TraceError(
                f"The first {taken} bytes of the trace file {path} decompress to {size} bytes, "
                f"over {MAX_RATIO} times as many. No trace is compressed this much; if you trust "
                "the file, decompress it with gunzip first."
            )
        if plain:
            yield plain
        if stream.eof:  # another gzip member or zeros as padding may follow
            packed = (stream.unused_data or file.read(CHUNK_BYTES)).lstrip(b"\0")
            stream = zlib.decompressobj(31) if packed else stream
        else:
            packed = stream.unconsumed_tail or file.read(CHUNK_BYTES)
    if not stream.eof:
        raise EOFError


def _fastest() -> Any:
    for name in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module("zlib")
