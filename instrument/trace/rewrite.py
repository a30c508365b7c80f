"""Copying a trace file: packed or plain, with keys put first, and with times that are JSON."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from instrument.errors import TraceError
from instrument.files import replacing
from instrument.trace.json_stream import with_one_sign

_CHUNK = 1 << 20
# What is looked at in one go; larger pieces leave the processor's cache. It adds a tenth to the time of a rewrite.
_LOOKED_AT = 1 << 17
_LONGEST_TIME = 64  # with its key
# A trace of 42 MB: level 3 takes 0.15 s and leaves a 13th, level 6 0.35 s and a 17th, level 9 1.15 s and a 19th.
_LEVEL = 3


def rewrite(source: Path, target: Path, metadata: Mapping[str, Any]) -> None:
    """Write the trace `source` as `target`, gzipped if that name ends in `.gz`, with keys put first.

    Where the clock was set back while it was recorded, negative times that torch writes as no JSON become JSON, so that
    Perfetto opens it; unless the file is only copied. The target appears whole or not at all, and may be the source.

    Raises:
        TraceError: there are keys to add and the file does not begin with an opening brace.
    """
    packed = _is_gzip(source)
    with replacing(target) as raw:
        if packed == (target.suffix == ".gz") and not metadata:
            with source.open("rb") as copied:
                shutil.copyfileobj(copied, raw, _CHUNK)
            return
        with (
            gzip.open(source) if packed else source.open("rb") as before,
            writing(raw, target) as after,
        ):
            begun = (
                _put_first(metadata, cast(IO[bytes], before), after, source) if metadata else b""
            )
            _copy_times(begun, cast(IO[bytes], before), after)


def _copy_times(rest: bytes, before: IO[bytes], after: IO[bytes]) -> None:
    """Copy a trace, its negative times as JSON has them; no number holds a comma, so none is cut at one."""
    while chunk := before.read(_LOOKED_AT):
        chunk = rest + chunk
        end = chunk.rfind(b",") + 1 or (len(chunk) if len(chunk) > _LONGEST_TIME else 0)
        after.write(with_one_sign(chunk[:end]))
        rest = chunk[end:]
    after.write(with_one_sign(rest))


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _put_first(
    metadata: Mapping[str, Any], before: IO[bytes], after: IO[bytes], source: Path
) -> bytes:
    """Write the document's beginning with the metadata; gives what was read behind it."""
    head = before.read(_LOOKED_AT).lstrip()  # torch begins with a line break
    if not head.startswith(b"{"):
        raise TraceError(
            f"{source} does not begin with '{{', so it is no trace that metadata can be added to."
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
    """What is to be written into a target's file: gzipped where its name ends in `.gz`."""
    if target.suffix != ".gz":
        yield raw
        return
    # No file name and no time inside: the same trace gives the same bytes.
    with gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as packed:
        yield cast(IO[bytes], packed)
