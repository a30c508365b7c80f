"""The compiled scanner beside the decoder: on each text both give the same columns, or the scanner gives up."""

from __future__ import annotations

from capture.plain_loops import same

from instrument.read.trace.events import Events
from instrument.read.trace.reader import _Columns
from instrument.read.trace.scanner import Scanned
from instrument.read.trace.schema import decode


def _finished(columns: _Columns) -> Events | str:
    try:
        return columns.finish(base_ns=0)
    except OverflowError as error:
        return str(error)


def is_scanned_as_decoded(text: bytes) -> bool:
    """Whether the scanner understands some events with commas between them.

    Asserts that the decoder then understands them too, with the same columns.
    """
    scanning, decoding = _Columns(), _Columns()
    found = scanning.scanner.begin(text, 0, len(text))()
    if not isinstance(found, Scanned):
        return False
    scanning.add(found)
    scanning.add_scanned()
    decoding.add(decode(b"[%b]" % text))
    one, other = _finished(scanning), _finished(decoding)
    assert one == other if isinstance(one, str) or isinstance(other, str) else same(one, other)
    return True
