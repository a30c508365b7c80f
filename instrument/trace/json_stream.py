"""Decoding the events of a trace file piece by piece, without the whole text in memory.

A piece must end where an event ends. The layout of the text does not show where, as it differs
between versions of torch. So `Pieces` guesses, and decoding proves it: text that starts at an event
and stops at a `}` before `, {` is a JSON list between brackets if and only if this `}` ends an
event. If decoding fails, the guess or the text is wrong, and a smaller piece is tried. The smallest
is decoded event by event, by a parser that accepts what Kineto has been seen to write: NaN, bad
escapes, control characters, broken UTF-8.
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
# No event is longer, nor is the text before or behind the events: so much is in memory at most.
LONGEST = 1 << 24
# A piece stands between brackets, for the decoder, and between margins, for the scanner.
_OPENS, _CLOSES = b"[".rjust(MARGIN), b"]".ljust(MARGIN)
_BLANK = b" \t\r\n"
_KEY = b'"traceEvents"'
_KEYS_TRIED = 16
_LATEST_NS = 2**62  # in Unix time the year 2116
# A string, ended or not, or a bracket.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\]]', re.DOTALL)
# Kineto gives both parts of a negative time a sign, as in `"dur": -1918637.-566`.
_TWO_SIGNS = re.compile(rb'("(?:ts|dur)"\s*:\s*)-?(\d{1,20})\.-(\d{1,3})(?!\d)')
_BAD_ESCAPE = re.compile(r'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')
_FORGIVING = json.JSONDecoder(strict=False, parse_constant=lambda _: None)


class _Document(msgspec.Struct):
    """A trace, as far as it is read besides its events."""

    traceEvents: list[Any]  # noqa: N815 - the format's own name
    baseTimeNanoseconds: Any = None  # noqa: N815
    distributedInfo: Any = None  # noqa: N815


class Pieces:
    """Iterates over the events of a trace piece by piece, once.

    Each piece is the result of `scan`, or of `decode` where that gives None. Both take the text of
    a JSON list of events; `scan` gets it between margins. `decode` raises the errors of msgspec.
    `coerce` makes an event of a dict, and of its repaired text, if `decode` cannot read it.

    Attributes (valid after the iteration):
        base_ns: from the document; with it added, times are Unix time.
        distributed: from the document; rank, world size and others.
        cut_short: whether the text ends before the document does.
        gzip_cut_short: whether the gzip data ends too early.

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
        self._chunks, self._path = chunks, path
        self._scan, self._decode, self._coerce = scan, decode, coerce
        self._text, self._at = b"", 0  # the text in memory, and the position in it
        self._passed, self._at_end = 0, False  # the bytes of the file before it

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
        """Read until the text has at least `size` bytes ahead, or the file ends."""
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
        """Advance to the first event; return whether the document is a bare list."""
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
            raise self._not_a_trace()
        return False

    def _find_events(self) -> bool:
        """Advance into the list traceEvents of the document; False if it has none."""
        searched, tried = self._at, 0
        while tried < _KEYS_TRIED:
            key = self._text.find(_KEY, searched)
            bracket = (
                _skip(self._text, key + len(_KEY), _BLANK + b":") if key >= 0 else len(self._text)
            )
            if bracket < len(self._text):
                tried += 1
                head = self._text[self._at : key] + _KEY + b":[]}"
                if self._text[bracket : bracket + 1] == b"[" and self._read_document(head):
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

    def _read_document(self, text: bytes) -> bool:
        """Read the keys of a document without its events; False if it is not a document."""
        try:
            document = msgspec.json.decode(text, type=_Document)
        except BAD:
            try:
                document = msgspec.convert(forgiving(text)[0], _Document)
            except (*BAD, ValueError):
                return False
        base_ns = document.baseTimeNanoseconds
        if isinstance(base_ns, int) and abs(base_ns) < _LATEST_NS:
            self.base_ns = base_ns
        if isinstance(document.distributedInfo, dict):
            self.distributed = document.distributedInfo
        return True

    def _one_by_one(self) -> tuple[list[Any], bool]:
        """The next few events, decoded one by one; and whether more may follow."""
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
        """Add the events that end before a position to `events`; return whether the list ended."""
        while True:
            begin = self._at = _skip(self._text, self._at, _BLANK + b",")
            character = self._text[begin : begin + 1]
            if character == b"]":
                self._at = begin + 1
                return True
            if character and character != b"{":
                raise self._not_an_event(character, self._passed + begin)
            end = _object_end(self._text, begin, stop) if character else -1
            if end < 0:
                return False
            events.append(self._decode_one(self._text[begin:end], begin))
            self._at = end

    def _decode_one(self, text: bytes, begin: int) -> Any:
        try:
            return self._decode(b"[" + text + b"]")[0]
        except BAD:
            pass
        try:
            event, repaired = forgiving(text)
        except (ValueError, RecursionError) as error:
            raise self._not_json(f"{error}, in the event at byte {self._passed + begin}") from None
        return self._coerce(event, repaired)

    def _close(self, is_list: bool) -> None:
        """Read the text behind the events."""
        while not self._at_end:
            self._at = _skip(self._text, self._at, _BLANK)
            if len(self._text) - self._at > LONGEST:
                raise self._too_long("what follows its events")
            self._fill(2 * (len(self._text) - self._at) + 1)
        rest = self._text[self._at :].strip(_BLANK)
        where = f"at byte {self._passed + self._at}"
        if is_list:
            if rest:
                raise self._not_json(f"something follows the list {where}")
            return
        document = b'{"traceEvents":[]' + rest
        if self._read_document(document):
            return
        if _object_end(document, 0, len(document)) >= 0:
            raise self._not_json(f"what follows the events {where} is malformed")
        self.cut_short = True

    def _not_a_trace(self) -> TraceError:
        """The error for a text without a list of events."""
        if self.gzip_cut_short:
            return cut_short(self._path, gzip=True)
        try:
            msgspec.json.decode(self._text[self._at :], type=msgspec.Raw)
        except BAD as error:
            if self._at_end and "truncated" in str(error):
                return cut_short(self._path)
            return self._not_json(str(error))
        return self._other_json()

    def _not_an_event(self, character: bytes, at: int) -> TraceError:
        """The error for an element of the list that is not an object."""
        if character in b'"-0123456789tfn[':
            return self._other_json()
        return self._not_json(f"invalid character (byte {at})")

    def _too_long(self, what: str) -> TraceError:
        most = LONGEST >> 20
        return TraceError(
            f"The file {self._path} is not a trace: {what} takes more than {most} MiB; "
            "give a Chrome trace."
        )

    def _other_json(self) -> TraceError:
        return TraceError(
            f"The file {self._path} is JSON, but not a trace: it has no list of traceEvents."
        )

    def _not_json(self, why: str) -> TraceError:
        return TraceError(f"The trace file {self._path} is not JSON ({why}); give a Chrome trace.")


def cut_short(path: Path, *, gzip: bool = False) -> TraceError:
    """The error for a file that ends before its first event."""
    how = "gzip cut short" if gzip else "cut short: its JSON does not end"
    return TraceError(f"The trace file {path} is {how}; copy or record it again.")


def forgiving(text: bytes) -> tuple[Any, str]:
    """A JSON value, and its text with repairs.

    Backslashes of unknown escapes are taken literally, NaN and Infinity are null, and times with
    two signs have one.

    Raises:
        ValueError: the text is not JSON with these repairs either.
        RecursionError: it is nested too deeply.
    """
    text = with_one_sign(text)
    repaired = _BAD_ESCAPE.sub(lambda match: match[1] or r"\\", text.decode("utf-8", "replace"))
    return _FORGIVING.decode(repaired), repaired


def with_one_sign(text: bytes) -> bytes:
    """The text with negative times that are valid JSON; without one, 0.1 ms for each MB."""
    characters = np.frombuffer(text, np.uint8)  # `b".-" in text` takes ten times as long
    if not (characters[np.flatnonzero(characters == ord("-")) - 1] == ord(".")).any():
        return text
    return _TWO_SIGNS.sub(lambda found: b"%b-%b.%03d" % (found[1], found[2], int(found[3])), text)


def _skip(text: bytes, at: int, characters: bytes) -> int:
    """The first position from `at` on without any of these characters."""
    size = 16
    while at < len(text):
        part = text[at : at + size]
        if rest := part.lstrip(characters):
            return at + len(part) - len(rest)
        at, size = at + len(part), min(size * 2, LARGEST)
    return at


def _last_end(text: bytes, begin: int, end: int) -> int:
    """The end of the last `}` before a `, {` between two positions; -1 if there is none."""
    at = text.rfind(b"{", begin, end)
    while at > begin:
        comma = _skip_back(text, at)
        if text[comma] == 0x2C:
            close = _skip_back(text, comma)
            if text[close] == 0x7D and close > begin:
                return close + 1
        at = text.rfind(b"{", begin, at)
    return -1


def _skip_back(text: bytes, at: int) -> int:
    """The last position before `at` without a blank; 0 if there is none."""
    size = 16
    while at > 0:
        begin = max(at - size, 0)
        if part := text[begin:at].rstrip(_BLANK):
            return begin + len(part) - 1
        at, size = begin, size * 2
    return 0


def _object_end(text: bytes, begin: int, end: int) -> int:
    """The end of the bracket that closes the one at `begin`; -1 if it is not before `end`."""
    depth = 0
    for token in _TOKEN.finditer(text, begin, end):
        character = text[token.start()]
        if character in b"{[":
            depth += 1
        elif character in b"}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return -1
