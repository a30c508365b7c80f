"""Copy a trace file: compress or decompress it, add keys, and make all its times valid JSON."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from instrument.base.errors import TraceError
from instrument.base.files import replacing
from instrument.trace.gzip_stream import chunks
from instrument.trace.json_stream import cut_short, with_one_sign

_CHUNK = 1 << 20
# The repair of times reads this many bytes at once, because larger pieces exceed the CPU cache. The
# repair makes a rewrite a tenth slower.
_PIECE = 1 << 17
_LONGEST_TIME = 64  # the maximum number of bytes in a time and its key
# For a trace of 42 MB, level 3 takes 0.15 s and compresses by a factor of 13. Level 6 takes 0.35 s
# (factor 17), level 9 takes 1.15 s (factor 19).
_LEVEL = 3


def rewrite(source: Path, target: Path, metadata: Mapping[str, Any]) -> None:
    """Copy the trace `source` to `target`, with `metadata` as its first keys.

    The copy is gzip if the name of `target` ends in `.gz`. `target` appears whole or not at all,
    and may be `source`. Negative times, which torch writes in a form that is not JSON, become valid
    JSON; but if the compression stays and no key is added, all bytes are copied as they are.

    Raises:
        TraceError: the file cannot be read; its gzip data is cut short, is damaged or expands too
            much; or there are keys to add, but the file does not begin with an opening brace.
    """
    packed = _is_gzip(source)
    with replacing(target) as raw:
        if packed == (target.suffix == ".gz") and not metadata:
            with source.open("rb") as copied:
                shutil.copyfileobj(copied, raw, _CHUNK)
            return
        pieces = _pieces(source)
        try:
            with writing(raw, target) as after:
                rest = _insert_first(metadata, pieces, after, source) if metadata else b""
                _copy_times(rest, pieces, after)
        except EOFError:
            raise cut_short(source, gzip=True) from None


def _pieces(source: Path) -> Iterator[bytes]:
    for chunk in chunks(source):
        for begin in range(0, len(chunk), _PIECE):
            yield chunk[begin : begin + _PIECE]


def _copy_times(rest: bytes, pieces: Iterator[bytes], after: IO[bytes]) -> None:
    """Copy a trace and make its negative times valid JSON.

    The text is cut at commas, because no number contains a comma.
    """
    for piece in pieces:
        chunk = rest + piece
        end = chunk.rfind(b",") + 1 or (len(chunk) if len(chunk) > _LONGEST_TIME else 0)
        after.write(with_one_sign(chunk[:end]))
        rest = chunk[end:]
    after.write(with_one_sign(rest))


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _insert_first(
    metadata: Mapping[str, Any], pieces: Iterator[bytes], after: IO[bytes], source: Path
) -> bytes:
    """Write an opening brace and the metadata; return what follows the trace's own brace."""
    head = next(pieces, b"").lstrip()  # a trace of torch begins with a line break
    if not head.startswith(b"{"):
        raise TraceError(
            f"{source} does not begin with '{{', so metadata cannot be added: give a Chrome trace."
        )
    rest = head[1:].lstrip()
    pairs = ",\n  ".join(
        f"{json.dumps(key)}: {json.dumps(value)}" for key, value in metadata.items()
    )
    between = "\n" if rest.startswith(b"}") else ",\n  "
    after.write(b"{\n  " + pairs.encode() + between.encode())
    return rest


@contextmanager
def writing(raw: IO[bytes], target: Path) -> Iterator[IO[bytes]]:
    """Yield a file that writes to `raw`, compressed if the name of `target` ends in `.gz`."""
    if target.suffix != ".gz":
        yield raw
        return
    # The gzip header gets no file name and no time, so that the same trace gives the same bytes.
    with gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as packed:
        yield cast(IO[bytes], packed)
