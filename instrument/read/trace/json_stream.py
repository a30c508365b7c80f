"""Decode the events of a trace file piece by piece, so that memory never holds the whole text.

A piece must end where an event ends, which the layout of the text does not show. So `Pieces`
guesses that a `}` before `, {` ends an event; the text up to there, between brackets, is a JSON
list if and only if the guess is right. If decoding fails, a smaller piece is tried. The smallest is
decoded event by event, after repairs (`json_repair`). An event that cannot be read all the same is
counted.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instrument.base.errors import TraceError
from instrument.read.trace.gzip_stream import Source
from instrument.read.trace.json_repair import as_json, forgiving, with_escapes
from instrument.read.trace.schema import BAD

LARGEST, SMALLEST = 1 << 20, 1 << 13
# The limit in bytes of an event, and of the text before and after the list of events. Longer texts
# are refused, so that they do not fill the memory.
LONGEST = 1 << 24
_BLANK = b" \t\r\n"
_KEY = b'"traceEvents"'
_KEYS_TRIED = 16
_MOST_ITEMS = 1000  # only the first 1,000 items of a list other than `traceEvents` are read
_LATEST_NS = 2**62  # the year 2116 in Unix time
_VERSIONS = ("cuda_runtime_version", "hip_runtime_version")
# A string, with or without its closing quotation mark, or a bracket.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\]]', re.DOTALL)
# Where one event of torch ends and the next one begins. No event that torch writes contains it.
_NEXT_EVENT = re.compile(rb'\}\s*,\s*\{\s*"(?:ph|name)"\s*:')
# Where the last event ends, and what follows the end of any event.
_LAST_EVENT = re.compile(rb'\}\s*\]\s*(?:,\s*"|\}|\Z)')
_AFTER_EVENT = re.compile(rb'\s*(?:,\s*(?:\{\s*(?:"[^"\\]{0,99}"\s*:|\}|\Z)|\Z)|\](?!\s*")|\Z)')
_ARGS = re.compile(rb',\s*"args"\s*:')
_MOST_ENDS = 4  # the ends that are tried for an event that is not JSON


class _Begun(NamedTuple):
    """A piece whose events are being read; `passed` is the number of bytes before `text`."""

    text: bytes
    passed: int
    begin: int
    end: int
    size: int
    result: Callable[[], Any]


class Pieces:
    """Iterates once over the events of a trace, one piece at a time.

    Each item is the result of `begin` for one piece, or that of `decode` if that result is None.

    Args:
        source: the bytes of the file.
        path: the file, for error messages.
        decode: reads the text of a JSON list of events; raises the errors of msgspec if that fails.
        coerce: makes a struct of an event that `decode` cannot read, from the event as a dict and
            its repaired text.
        begin: begins to read the events between two positions of a text, and returns a function
            that waits for them; this function returns None if that fails.
        ahead: how many pieces are begun before the first one is awaited.

    Attributes (valid after the iteration):
        base_ns: what to add to the times of the trace to get Unix time; 0 if missing.
        distributed: the `distributedInfo` of the document: rank, world size and more.
        devices: the `deviceProperties` of the document.
        versions: the version of the device's runtime, such as 12040 for CUDA 12.4.
        cut_short: whether the JSON text is truncated.
        unreadable: the number of events that are not JSON; None stands for each in its piece.
        head, tail: the text before the first event and after the last one, perhaps repaired; `tail`
            is empty if the JSON text is truncated.

    Raises:
        TraceError: on iteration, if the text is empty, not JSON, or JSON but not a trace.
    """

    def __init__(
        self,
        source: Source,
        path: Path,
        decode: Callable[[bytes], list[Any]],
        coerce: Callable[[dict[str, Any], str], Any],
        begin: Callable[[bytes, int, int], Callable[[], Any]] = lambda *_: lambda: None,
        ahead: int = 1,
    ) -> None:
        self.base_ns = 0
        self.distributed: dict[str, Any] = {}
        self.devices: list[dict[str, Any]] = []
        self.versions: dict[str, int] = {}
        self.cut_short = False
        self.unreadable = 0
        self.head = self.tail = b""
        self._source, self._path = source, path
        self._begin, self._ahead = begin, ahead
        self._decode, self._coerce = decode, coerce
        self._text, self._at = b"", 0  # the text in memory, and the current position in it
        self._passed, self._at_end = 0, False  # the number of bytes before `_text`
        self._has_read, self._first_error = False, ""

    def __iter__(self) -> Iterator[list[Any]]:
        is_list = self._open()
        size, begun = SMALLEST * 8, deque[_Begun]()
        while True:
            while len(begun) < (self._ahead if size == LARGEST else 1):
                if not self._begin_piece(size, begun):
                    break
                size = min(size * 2, LARGEST)
            if begun:
                first = begun[0]
                try:
                    piece = first.result()
                    if piece is None:
                        text = memoryview(first.text)[first.begin : first.end]
                        piece = self._decode(b"".join((b"[", text, b"]")))
                except BAD:
                    self._go_back(begun)
                    size = first.size
                    if size > SMALLEST:
                        size = max(size // 8, SMALLEST)
                        continue
                else:
                    begun.popleft()
                    self._has_read = True
                    yield piece
                    continue
            events, more = self._one_by_one()
            yield events
            if not more:
                break
        if self._first_error and not self._has_read:
            raise self._not_json(self._first_error)
        if not self.cut_short:
            self._close(is_list)

    def _begin_piece(self, size: int, begun: deque[_Begun]) -> bool:
        """Begin to read the next piece, and pass it; false if none of at most `size` bytes ends."""
        self._fill(size)
        self._at = begin = _skip(self._text, self._at, _BLANK + b",")
        end = _piece_end(self._text, begin, begin + size)
        if end >= 0:
            result = self._begin(self._text, begin, end)
            begun.append(_Begun(self._text, self._passed, begin, end, size, result))
            self._at = end
        return end >= 0

    def _go_back(self, begun: deque[_Begun]) -> None:
        """Go back to where the first of these pieces begins, and forget that they were begun."""
        first, later = begun[0], b""
        texts = [(each.text, each.passed) for each in begun]
        for text, passed in (*texts, (self._text, self._passed)):
            later += text[first.passed + len(first.text) + len(later) - passed :]
        self._source.unread(later)
        self._text, self._at, self._passed = first.text, first.begin, first.passed
        self._at_end = False
        begun.clear()

    def _fill(self, size: int) -> None:
        """Read until at least `size` bytes follow the current position, or the file ends.

        Most texts that are read have the same length, so that Python can reuse the memory of an
        earlier one.
        """
        while not self._at_end and len(self._text) - self._at < size:
            rest = memoryview(self._text)[self._at :]
            self._text = self._source.after(rest, max(size, LARGEST) - len(rest))
            self._at_end = len(self._text) == len(rest)
            self._passed += self._at
            self._at = 0

    def _open(self) -> bool:
        """Advance to the first event; return whether the text is a list without an outer object."""
        self._fill(1)
        while not self._at_end and self._text.isspace():
            self._at = len(self._text)
            self._fill(1)
        text = self._text.removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK)
        if not text and not self._source.cut_short:
            raise TraceError(f"The trace file {self._path} is empty; copy or record it again.")
        self._at = len(self._text) - len(text)
        if text[:1] == b"[":
            self._at += 1
            self.head = b"["
            return True
        if text[:1] != b"{" or not self._find_events():
            raise self._not_a_trace()
        return False

    def _find_events(self) -> bool:
        """Advance to the first event in `traceEvents`; return False if there is no such list."""
        searched, tried = self._at, 0
        while tried < _KEYS_TRIED:
            key = self._text.find(_KEY, searched)
            bracket = (
                _skip(self._text, key + len(_KEY), _BLANK + b":") if key >= 0 else len(self._text)
            )
            if bracket < len(self._text):
                tried += 1
                head = self._text[self._at : key] + _KEY + b":[]}"
                if self._text[bracket : bracket + 1] == b"[" and (
                    document := self._read_document(head)
                ):
                    self.head = document[:-2]
                    self._at = bracket + 1
                    return True
                searched = key + 1
            elif self._at_end:
                return False
            elif len(self._text) - self._at > LONGEST:
                raise self._too_long("the text before its traceEvents")
            else:
                searched = (
                    key if key >= 0 else max(len(self._text) - len(_KEY), self._at)
                ) - self._at
                self._fill(2 * (len(self._text) - self._at) + 1)
                searched += self._at
        return False

    def _read_document(self, text: bytes) -> bytes:
        """Read what the object says of the recording; return its text, perhaps repaired.

        Returns an empty text if the text is not a JSON object with an empty list of events.
        """
        try:
            document = msgspec.json.decode(text, type=dict[str, Any])
        except BAD:
            try:
                value, repaired = forgiving(text, is_event=False)
                document, text = msgspec.convert(value, dict[str, Any]), as_json(repaired)
            except (*BAD, ValueError):
                return b""
        if document.get("traceEvents") != []:
            return b""
        base_ns, distributed = map(document.get, ("baseTimeNanoseconds", "distributedInfo"))
        if isinstance(base_ns, int) and abs(base_ns) < _LATEST_NS:
            self.base_ns = base_ns
        if isinstance(distributed, dict):
            self.distributed = distributed
        self.devices += _items(document.get("deviceProperties"), dict)
        self.versions |= {
            key: value for key in _VERSIONS if type(value := document.get(key)) is int and value > 0
        }
        return text

    def _one_by_one(self) -> tuple[list[Any], bool]:
        """Decode the next few events one by one; return them, and whether more may follow."""
        events: list[Any] = []
        size = SMALLEST
        while True:
            self._fill(size)
            begin, stop = self._at, self._at + size
            if self._take(events, stop):
                return events, False
            if events:
                return events, True
            if self._at_end and stop >= len(self._text):
                self.cut_short = True
                return events, False
            if self._at == begin:
                size *= 2
            if size > LONGEST:
                raise self._too_long("an event")

    def _take(self, events: list[Any], stop: int) -> bool:
        """Append the events before `stop` to `events`; return whether their list has ended."""
        while True:
            begin = self._at = _skip(self._text, self._at, _BLANK + b",")
            character = self._text[begin : begin + 1]
            if character == b"]":
                self._at = begin + 1
                return True
            if character and character != b"{":
                raise self._not_an_event(character, self._passed + begin)
            if events:  # a long event may come before many short ones
                stop = min(stop, begin + SMALLEST)
            end = _event_end(self._text, begin, stop) if character else -1
            if end < 0:
                return False
            events.append(self._decode_one(self._text[begin:end], begin))
            self._at = end

    def _decode_one(self, text: bytes, begin: int) -> Any:
        try:
            event = self._decode(b"[" + text + b"]")[0]
        except BAD:
            pass
        else:
            self._has_read = True
            return event
        try:
            event, repaired = forgiving(text)
        except (ValueError, RecursionError) as error:
            args = _ARGS.search(text)  # Kineto writes the arguments last
            try:
                event, repaired = forgiving(text[: args.start()] + b"}" if args else text)
            except (ValueError, RecursionError):
                where = f"in the event at byte {self._passed + begin}"
                self.unreadable += 1
                self._first_error = self._first_error or f"{error}, {where}"
                return None
        self._has_read = True
        return self._coerce(event, repaired)

    def _close(self, is_list: bool) -> None:
        while not self._at_end:
            self._at = _skip(self._text, self._at, _BLANK)
            if len(self._text) - self._at > LONGEST:
                raise self._too_long("the text after its events")
            self._fill(2 * (len(self._text) - self._at) + 1)
        rest = self._text[self._at :].strip(_BLANK)
        where = f"at byte {self._passed + self._at}"
        if is_list:
            if rest:
                raise self._not_json(f"there is more text after the list, {where}")
            self.tail = b"]"
            return
        document = b'{"traceEvents":[]' + rest
        if read := self._read_document(document):
            self.tail = read.removeprefix(b'{"traceEvents":[')
            return
        if _object_end(document, 0, len(document)) >= 0:
            raise self._not_json(f"the text after the events, {where}, is malformed")
        self.cut_short = True

    def _not_a_trace(self) -> TraceError:
        if self._source.cut_short:
            return cut_short(self._path, gzip=True)
        try:
            msgspec.json.decode(self._text[self._at :], type=msgspec.Raw)
        except BAD as error:
            if self._at_end and "truncated" in str(error):
                return cut_short(self._path)
            return self._not_json(str(error))
        return self._other_json()

    def _not_an_event(self, character: bytes, at: int) -> TraceError:
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
    """The error for a file that is truncated before the end of its first event."""
    how = "gzip that is cut short" if gzip else "cut short: its JSON does not end"
    return TraceError(f"The trace file {path} is {how}; copy or record it again.")


def _items(found: Any, kind: type[Any]) -> list[Any]:
    """The items of type `kind` in the first 1,000 items of a list; empty if `found` is no list."""
    items = found[:_MOST_ITEMS] if isinstance(found, list) else []
    return [item for item in items if isinstance(item, kind)]


def _skip(text: bytes, at: int, characters: bytes) -> int:
    """The first position, from `at` on, whose byte is not in `characters`, or the end."""
    size = 16
    while at < len(text):
        part = text[at : at + size]
        if rest := part.lstrip(characters):
            return at + len(part) - len(rest)
        at, size = at + len(part), min(size * 2, LARGEST)
    return at


def _piece_end(text: bytes, begin: int, end: int) -> int:
    """Guess a position such that `text[begin:position]` holds only whole events; -1 if none.

    It is directly after the `}` of the last `}, {` before `end`, with or without blanks, or after
    the event at `begin`, which may be the last event of the trace.
    """
    at = text.rfind(b"{", begin, end)
    while at > begin:
        comma = _skip_back(text, at)
        if text[comma] == 0x2C:
            close = _skip_back(text, comma)
            if text[close] == 0x7D and close > begin and _AFTER_EVENT.match(text, close + 1):
                return close + 1
        at = text.rfind(b"{", begin, at)
    found = _object_end(text, begin, end) if text[begin : begin + 1] == b"{" else -1
    return found if _AFTER_EVENT.match(text, max(found, 0)) else -1


def _skip_back(text: bytes, at: int) -> int:
    size = 16
    while at > 0:
        begin = max(at - size, 0)
        if part := text[begin:at].rstrip(_BLANK):
            return begin + len(part) - 1
        at, size = begin, size * 2
    return 0


def _event_end(text: bytes, begin: int, stop: int) -> int:
    """The position after the event at `begin`; -1 if the event does not end before `stop`.

    After a stray quotation mark, brackets look like a part of a string. So an event that is not
    valid JSON ends where torch's next event seems to begin.
    """
    following = _NEXT_EVENT.search(text, begin, stop)
    until = stop if following is None else following.start() + 1
    found = _object_end(text, begin, until)
    if found >= 0 and (found == until or _is_event(text, begin, found)):
        return found
    for pattern in (_NEXT_EVENT, _LAST_EVENT):
        for each in islice(pattern.finditer(text, begin, stop), _MOST_ENDS):
            if _is_whole(text[begin : each.start() + 1]):
                return each.start() + 1
    if following is None:
        return -1
    whole = _object_end(text, begin, stop)  # the next event may be an object in this one
    return whole if whole >= 0 and _is_event(text, begin, whole) else until


def _is_event(text: bytes, begin: int, end: int) -> bool:
    """Whether an event ends at `end`, and after it the list of events continues or ends."""
    return _AFTER_EVENT.match(text, end) is not None and _is_whole(text[begin:end])


def _is_whole(text: bytes) -> bool:
    """Whether a text is a JSON object, perhaps after repairs."""
    return _is_json(text) or with_escapes(text.decode("utf-8", "replace")) is not None


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except BAD:
        return False
    return True


def _object_end(text: bytes, begin: int, end: int) -> int:
    """The position after the bracket that closes the one at `begin`; -1 if not before `end`."""
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
