"""Copy a trace file: compress or decompress it, add keys, and make it valid JSON."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from instrument.base.errors import TraceError
from instrument.base.files import replacing
from instrument.read.trace.gzip_stream import Source, chunks
from instrument.read.trace.json_repair import as_json
from instrument.read.trace.json_stream import Pieces, cut_short

_CHUNK = 1 << 20
# For a trace of 42 MB, level 3 takes 0.15 s and compresses by a factor of 13. Level 6 takes 0.35 s
# (factor 17), level 9 takes 1.15 s (factor 19).
_LEVEL = 3


def rewrite(source: Path, target: Path, metadata: Mapping[str, Any]) -> None:
    """Copy the trace `source` to `target`, with `metadata` as its first keys.

    The copy is gzip if the name of `target` ends in `.gz`. `target` appears whole or not at all,
    and may be `source`. What torch writes in a form that is not JSON, such as a quotation mark in a
    name or a negative time, becomes valid JSON; but if the compression stays and no key is added,
    or the text is cut short or an event cannot be repaired, all bytes are copied as they are.

    Raises:
        TraceError: the file cannot be read; its gzip data is cut short, is damaged or expands too
            much; or there are keys to add, but the file does not begin with an opening brace.
    """
    with replacing(target) as raw, source.open("rb") as opened:
        is_packed = opened.read(2) == b"\x1f\x8b"
        if is_packed == (target.suffix == ".gz") and not metadata:
            opened.seek(0)
            shutil.copyfileobj(opened, raw, _CHUNK)
            return
        try:
            _copy(_repaired(source), metadata, raw, source, target)
        except _NotRepairedError:
            raw.seek(0)
            raw.truncate()
            _copy(chunks(source), metadata, raw, source, target)


class _NotRepairedError(Exception):
    """The text of a trace is not JSON, and cannot be repaired."""


def _copy(
    texts: Iterator[bytes | memoryview],
    metadata: Mapping[str, Any],
    raw: IO[bytes],
    source: Path,
    target: Path,
) -> None:
    try:
        with writing(raw, target) as after:
            after.write(_insert_first(metadata, texts, after, source) if metadata else b"")
            for text in texts:
                after.write(text)
    except EOFError:
        raise cut_short(source, gzip=True) from None


def _repaired(source: Path) -> Iterator[bytes | memoryview]:
    """Yield the text of a trace in pieces; an event that is not JSON is repaired.

    Raises:
        EOFError: after the last complete event, if the gzip data is cut short.
        _NotRepairedError: the text, or an event, cannot be repaired.
    """
    with closing(Source(source)) as opened:
        pieces = Pieces(opened, source, _checked, lambda _, text: as_json(text))
        after = None
        try:
            for events in pieces:
                if after is None:
                    yield pieces.head
                    after = b""
                if None in events:
                    raise _NotRepairedError
                for text in events:
                    yield after
                    yield text
                    after = b",\n"
        except TraceError:
            raise _NotRepairedError from None
        if opened.cut_short:
            raise EOFError
        if pieces.cut_short:
            raise _NotRepairedError
        yield pieces.tail


def _checked(text: bytes) -> list[memoryview]:
    """The events of a JSON list, as one text without brackets."""
    msgspec.json.decode(text, type=msgspec.Raw)
    if not text.isascii():
        text.decode()
    return [memoryview(text)[1:-1]]


def _insert_first(
    metadata: Mapping[str, Any], texts: Iterator[bytes | memoryview], after: IO[bytes], source: Path
) -> bytes:
    """Write an opening brace and the metadata; return what follows the trace's own brace."""
    head = bytes(next(texts, b"")).lstrip()  # a trace of torch begins with a line break
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
