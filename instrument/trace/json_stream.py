"""The events of a trace file, decoded some at a time, without ever holding its whole text.

Where one event ends is not told by the layout, which changed between versions of torch. A guess is made instead and
proved: text that starts at an event and stops at a `}` before `, {` is a JSON list between brackets if and only if
that `}` ends an event. Where the guess or the text is wrong the piece is made smaller, and the smallest is taken apart
event by event, which forgives what Kineto has been seen to write: NaN, bad escapes, control characters, broken UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from instrument.errors import TraceError
from instrument.trace.layout import MARGIN
from instrument.trace.schema import BAD

LARGEST, SMALLEST = 1 << 21, 1 << 13
# No event is longer, and what stands before or behind the events is not either: so much is held at most.
LONGEST = 1 << 24
# A piece stands between brackets, for the decoder, and between margins, for the scanner.
_OPENS, _CLOSES = b"[".rjust(MARGIN), b"]".ljust(MARGIN)
_BLANK = b" \t\r\n"
_KEY = b'"traceEvents"'
_KEYS_TRIED = 16
_LATEST_NS = 2**62  # in Unix time the year 2116
# A string, ended or not, or a bracket.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\]]', re.DOTALL)
# Kineto writes whole and broken part of a negative time each with its sign, as in `"dur": -1918637.-566`.
_TWO_SIGNS = re.compile(rb'("(?:ts|dur)"\s*:\s*)-?(\d{1,20})\.-(\d{1,3})(?!\d)')
_BAD_ESCAPE = re.compile(r'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')
_FORGIVING = json.JSONDecoder(strict=False, parse_constant=lambda _: None)


class _Around(msgspec.Struct):
    """What stands beside the events."""

    traceEvents: list[Any]  # noqa: N815 - the format's own name
    baseTimeNanoseconds: Any = None  # noqa: N815
    distributedInfo: Any = None  # noqa: N815


class Pieces:
    """Iterates over a trace's events piece by piece, once; then `base_ns`, `distributed` and `cut_short` are known.

    `scan` is asked first, with the text of a JSON list between margins: what it makes of it is the piece, unless that
    is None. `decode` makes a list of events of such a text and raises msgspec's errors; `coerce` makes one of an event
    that could only be read forgivingly, of which it gets the repaired text too. `cut_short`: the text ends before the
    document does, within an event or behind the last.

    Raises:
        TraceError: while iterating: the text is empty, not JSON, or JSON but not a trace.
    """

    def __init__(
        self,
        chunks: Iterator[bytes],
        path: Path,
        scan: Callable[[bytes], Any],
        decode: Callable[[bytes], list[Any]],
        coerce: Callable[[dict[str, Any], str], Any],
    ) -> None:
        self.base_ns = 0
        self.distributed: dict[str, Any] = {}
        self.cut_short = False
        self.gzip_cut_short = False
        self._chunks, self._path, self._scan, self._decode, self._coerce = (
            chunks,
            path,
            scan,
            decode,
            coerce,
        )
        self._text, self._at, self._passed, self._at_end = b"", 0, 0, False

    def __iter__(self) -> Iterator[list[Any]]:
        is_list = self._open()
        size = SMALLEST * 8
        while True:
            self._fill(size)
            self._at = _skip(self._text, self._at, _BLANK + b",")
            end = _last_end(self._text, self._at, self._at + size)
            if end >= 0:
                try:
                    text = b"".join((_OPENS, memoryview(self._text)[self._at : end], _CLOSES))
                    piece = self._scan(text)
                    piece = self._decode(text) if piece is None else piece
                except BAD:
                    if size > SMALLEST:
                        size = max(size // 8, SMALLEST)
                        continue
                else:
                    self._at = end
                    size = min(size * 2, LARGEST)
                    yield piece
                    continue
            events, more = self._one_by_one()
            yield events
            if not more:
                break
        if not self.cut_short:
            self._close(is_list)

    def _fill(self, size: int) -> None:
        """Have at least so many bytes ahead, where the file has them."""
        parts, ahead = [], len(self._text) - self._at
        while ahead < size and not self._at_end:
            try:
                part = next(self._chunks, b"")
            except EOFError:
                part, self.gzip_cut_short = b"", True
            self._at_end = not part
            parts.append(part)
            ahead += len(part)
        if parts:
            self._passed += self._at
            self._text = b"".join((memoryview(self._text)[self._at :], *parts))
            self._at = 0

    def _open(self) -> bool:
        """Go to the first event; whether the document is a bare list."""
        self._fill(1)
        while not self._at_end and self._text.isspace():
            self._at = len(self._text)
            self._fill(1)
        text = self._text.removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK)
        if not text and not self.gzip_cut_short:
            raise TraceError(f"The trace file {self._path} is empty; copy or record it again.")
        self._at = len(self._text) - len(text)
        if text[:1] == b"[":
            self._at += 1
            return True
        if text[:1] != b"{" or not self._find_events():
            raise self._no_trace()
        return False

    def _find_events(self) -> bool:
        """Go behind the bracket of the document's own traceEvents; False where there is none."""
        searched, tried = self._at, 0
        while tried < _KEYS_TRIED:
            key = self._text.find(_KEY, searched)
            bracket = (
                _skip(self._text, key + len(_KEY), _BLANK + b":") if key >= 0 else len(self._text)
            )
            if bracket < len(self._text):
                tried += 1
                head = self._text[self._at : key] + _KEY + b":[]}"
                if self._text[bracket : bracket + 1] == b"[" and self._keep_around(head):
                    self._at = bracket + 1
                    return True
                searched = key + 1
            elif self._at_end:
                return False
            elif len(self._text) - self._at > LONGEST:
                raise self._too_long("what stands before its traceEvents")
            else:
                searched = (
                    key if key >= 0 else max(len(self._text) - len(_KEY), self._at)
                ) - self._at
                self._fill(2 * (len(self._text) - self._at) + 1)
                searched += self._at
        return False

    def _keep_around(self, document: bytes) -> bool:
        """Take what a document without its events says of them; False where it is none."""
        try:
            around = msgspec.json.decode(document, type=_Around)
        except BAD:
            try:
                around = msgspec.convert(forgiving(document)[0], _Around)
            except (*BAD, ValueError):
                return False
        if (
            isinstance(around.baseTimeNanoseconds, int)
            and abs(around.baseTimeNanoseconds) < _LATEST_NS
        ):
            self.base_ns = around.baseTimeNanoseconds
        if isinstance(around.distributedInfo, dict):
            self.distributed = around.distributedInfo
        return True

    def _one_by_one(self) -> tuple[list[Any], bool]:
        """The events in a small stretch, each by itself; whether more may follow."""
        events: list[Any] = []
        size = SMALLEST
        while True:
            self._fill(size)
            begin, stop = self._at, self._at + size
            if self._take(events, stop):
                return events, False
            if self._at_end and stop >= len(self._text):
                self.cut_short = True
                return events, False
            if events:
                return events, True
            if self._at == begin:
                size *= 2
            if size > LONGEST:
                raise self._too_long("an event")

    def _take(self, events: list[Any], stop: int) -> bool:
        """Add the events that end before a position; whether the list ended as well."""
        while True:
            begin = self._at = _skip(self._text, self._at, _BLANK + b",")
            mark = self._text[begin : begin + 1]
            if mark == b"]":
                self._at = begin + 1
                return True
            if mark and mark != b"{":
                raise self._no_event(mark, self._passed + begin)
            end = _object_end(self._text, begin, stop) if mark else -1
            if end < 0:
                return False
            events.append(self._one(self._text[begin:end], begin))
            self._at = end

    def _one(self, text: bytes, begin: int) -> Any:
        try:
            return self._decode(b"[" + text + b"]")[0]
        except BAD:
            pass
        try:
            event, repaired = forgiving(text)
        except (ValueError, RecursionError) as error:
            raise self._no_json(f"{error}, in the event at byte {self._passed + begin}") from None
        return self._coerce(event, repaired)

    def _close(self, is_list: bool) -> None:
        """Read what follows the events."""
        while not self._at_end:
            self._at = _skip(self._text, self._at, _BLANK)
            if len(self._text) - self._at > LONGEST:
                raise self._too_long("what follows its events")
            self._fill(2 * (len(self._text) - self._at) + 1)
        rest = self._text[self._at :].strip(_BLANK)
        where = f"at byte {self._passed + self._at}"
        if is_list:
            if rest:
                raise self._no_json(f"something follows the list {where}")
            return
        document = b'{"traceEvents":[]' + rest
        if self._keep_around(document):
            return
        if _object_end(document, 0, len(document)) >= 0:
            raise self._no_json(f"what follows the events {where} is malformed")
        self.cut_short = True

    def _no_trace(self) -> TraceError:
        """What to say of a text that holds no list of events."""
        if self.gzip_cut_short:
            return cut_short(self._path, gzip=True)
        try:
            msgspec.json.decode(self._text[self._at :], type=msgspec.Raw)
        except BAD as error:
            if self._at_end and "truncated" in str(error):
                return cut_short(self._path)
            return self._no_json(str(error))
        return self._other_json()

    def _no_event(self, mark: bytes, at: int) -> TraceError:
        """What to say of an element of the list that is no object."""
        return (
            self._other_json()
            if mark in b'"-0123456789tfn['
            else self._no_json(f"invalid character (byte {at})")
        )

    def _too_long(self, what: str) -> TraceError:
        most = LONGEST >> 20
        return TraceError(
            f"The file {self._path} is not a trace: {what} takes more than {most} MiB; give a Chrome trace."
        )

    def _other_json(self) -> TraceError:
        return TraceError(
            f"The file {self._path} is JSON, but not a trace: it has no list of traceEvents."
        )

    def _no_json(self, why: str) -> TraceError:
        return TraceError(f"The trace file {self._path} is not JSON ({why}); give a Chrome trace.")


def cut_short(path: Path, *, gzip: bool = False) -> TraceError:
    """The error for a file that ends before it says anything."""
    how = "gzip cut short" if gzip else "cut short: its JSON does not end"
    return TraceError(f"The trace file {path} is {how}; copy or record it again.")


def forgiving(text: bytes) -> tuple[Any, str]:
    """A JSON value and its repaired text: unknown escapes stay as they stand, NaN and Infinity are null.

    A time with two signs has one.

    Raises:
        ValueError: it is no JSON all the same.
        RecursionError: it is nested too deeply.
    """
    text = with_one_sign(text)
    repaired = _BAD_ESCAPE.sub(lambda match: match[1] or r"\\", text.decode("utf-8", "replace"))
    return _FORGIVING.decode(repaired), repaired


def with_one_sign(text: bytes) -> bytes:
    """A trace's text with its negative times as JSON has them; 0.1 ms per MB where there is none."""
    characters = np.frombuffer(text, np.uint8)  # `b".-" in text` takes ten times as long
    if not (characters[np.flatnonzero(characters == ord("-")) - 1] == ord(".")).any():
        return text
    return _TWO_SIGNS.sub(lambda found: b"%b-%b.%03d" % (found[1], found[2], int(found[3])), text)


def _skip(text: bytes, at: int, what: bytes) -> int:
    """The first position from one on that holds none of some characters."""
    size = 16
    while at < len(text):
        part = text[at : at + size]
        if rest := part.lstrip(what):
            return at + len(part) - len(rest)
        at, size = at + len(part), min(size * 2, LARGEST)
    return at


def _last_end(text: bytes, begin: int, end: int) -> int:
    """Behind the last `}` that a `, {` follows, between two positions; -1 if there is none."""
    at = text.rfind(b"{", begin, end)
    while at > begin:
        comma = _back(text, at)
        if text[comma] == 0x2C:
            close = _back(text, comma)
            if text[close] == 0x7D and close > begin:
                return close + 1
        at = text.rfind(b"{", begin, at)
    return -1


def _back(text: bytes, at: int) -> int:
    """The last position before one that holds no blank; 0 where there is none."""
    size = 16
    while at > 0:
        begin = max(at - size, 0)
        if part := text[begin:at].rstrip(_BLANK):
            return begin + len(part) - 1
        at, size = begin, size * 2
    return 0


def _object_end(text: bytes, begin: int, end: int) -> int:
    """Behind the bracket that closes the one at `begin`; -1 if it is not there."""
    depth = 0
    for token in _TOKEN.finditer(text, begin, end):
        mark = text[token.start()]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1
