"""Scans a piece of a trace in Kineto's own layout with numpy, and decodes repeated text only once.

The events of a trace repeat a few hundred texts and differ in their numbers. The text between the
numbers differs between versions of torch, so the scanner learns it from the file. It reads the
numbers of all events of a piece at once, and decodes each distinct remaining text once.

The scanner checks every byte. It cuts a piece into blocks, from the opening brace of one event to
the opening brace of the next. In a block that it scans, the head and the rest of the arguments are
decoded as JSON objects, and all other bytes are plain numbers or text learned from a block of the
same form. Every other block is decoded alone and must be one JSON object. So the piece is exactly
the list of these objects. If this cannot be shown, there is no result. Text with a backslash is not
scanned.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.trace.digits import stands, thousandths_before
from instrument.trace.events import Flags, Ints
from instrument.trace.members import LONGEST_LITERAL, Members
from instrument.trace.schema import BAD, Args, Complete, Head, decode

# The number of bytes around a piece. The scanner may look so far beyond the ends of the piece, for
# up to four literals or numbers in a row.
MARGIN = 4 * 64
_LONGEST_NS = 2**43 * 1000  # the longest duration; floats are exact up to this value
_ODD = -1  # instead of a kind: the block is decoded alone
_MOST_KINDS, _FEW_KINDS = 1 << 14, 1 << 8
# The number of blanks is limited: without a limit, the time of a search would grow with its square.
_FORM = re.compile(
    rb'\{\s{0,64}"ph":\s{0,9}"X",[^{}]*?'
    rb'(?P<to_ts>,\s{0,64}"ts":\s{0,9})\d+(?:\.\d{1,3})?'
    rb'(?P<to_dur>,\s{0,64}"dur":\s{0,9})\d+(?:\.\d{1,3})?'
    rb'(?P<to_args>\s{0,64},\s{0,64}"args":\s{0,9})\{[^{}]*?'
    rb"(?P<closes>\s{0,64}\}\s{0,64}\})(?P<between>\s{0,9},\s{0,64})\{"
)
# The whole numbers that differ in nearly every event, and their columns.
_COLUMNS = {
    b"External id": "external_id",
    b"correlation": "correlation",
    b"Sequence number": "sequence",
    b"Fwd thread id": "forward_thread",
    b"Python id": "python_id",
    b"Python parent id": "python_parent",
}
# The decoder reads all other arguments that are kept.
_DECODED = {field.encode_name.encode() for field in msgspec.structs.fields(Args)} - _COLUMNS.keys()
_FOLLOWS = b'{"":""'  # stands for the numbers before a rest
_IDS = [b'"%b"' % key for key in (*_COLUMNS, b"external id")]
_HEAD = msgspec.json.Decoder(Head)
_RAW = msgspec.json.Decoder(list[msgspec.Raw])
_ARGS = msgspec.json.Decoder(Args)

Columns = dict[str, NDArray[Any]]


class _UnprovenError(ValueError):
    """The text does not have the expected form."""


@dataclass(frozen=True, slots=True)
class _Form:
    """The texts between the parts of an event, learned from the file."""

    to_ts: bytes
    to_dur: bytes
    to_args: bytes
    closes: bytes
    between: bytes


def _learned(text: bytes) -> _Form | None:
    """The form of the first event that has one.

    The form may be wrong: an event is scanned only if it has the same form.
    """
    found = _FORM.search(text)
    if found is None or max(map(len, found.groups())) >= LONGEST_LITERAL:
        return None
    return _Form(**found.groupdict())


class _Kinds(dict[Any, int]):
    """The position of each kind of event.

    A key is the text of the head, or the kind of the head and the text of the arguments.
    """

    def __init__(self) -> None:
        self.events: list[Complete] = []

    def __missing__(self, key: Any) -> int:
        event = _headed(key) if isinstance(key, bytes) else _with_rest(self.events[key[0]], key[1])
        return _ODD if event is None else self._add(key, event)

    def single(self, event: Complete) -> int:
        """Add a kind for this event alone; returns its position."""
        return self._add(len(self), event)

    def _add(self, key: Any, event: Complete) -> int:
        self.events.append(event)
        position = self[key] = len(self)
        return position

    def forget(self, after: int) -> None:
        """Remove the kinds from a position on."""
        del self.events[after:]
        while len(self) > after:
            self.popitem()


def _headed(text: bytes) -> Complete:
    """The event that begins with a text, from `{` to the comma before its time."""
    if text.count(b'"ph"') != 1:
        raise _UnprovenError
    head = _HEAD.decode(text + b"}")
    return Complete(name=head.name, pid=head.pid, tid=head.tid, cat=head.cat)


def _with_rest(event: Complete, args: bytes) -> Complete | None:
    """The event with its arguments, given without the last `}`.

    If `args` begins with `_FOLLOWS`, numbers stood before it. None if one of these numbers may
    occur a second time, because only the decoder knows which of the two counts.
    """
    if args.startswith(_FOLLOWS) and any(key in args for key in _IDS):
        return None
    return msgspec.structs.replace(event, args=_ARGS.decode(args + b"}"))


@dataclass(slots=True)
class _Blocks:
    """The positions at which each event of a piece begins and ends, and its arguments begin.

    `args` is 0 if the event does not have the form.
    """

    begin: Ints
    end: Ints
    args: Ints


@dataclass(slots=True)
class _Timed:
    """The events that have the form: their blocks, and the positions of their parts."""

    block: Ints
    begin: Ints
    head_end: Ints
    args: Ints
    args_end: Ints
    start_ns: Ints
    duration_ns: Ints

    def only(self, chosen: Flags) -> _Timed:
        return _Timed(*(getattr(self, name)[chosen] for name in self.__slots__))


def _blocks(text: bytes, form: _Form) -> _Blocks:
    """Cut a piece where one event seems to end and the next one seems to begin.

    The caller must check each block.
    """
    brace = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("{"))
    if not len(brace) or brace[0] != MARGIN:
        raise _UnprovenError
    before = b"}" + form.between + b"{"
    outer = stands(text, before, brace - (len(before) - 1))
    outer[0] = True
    begin, inner = brace[outer], np.flatnonzero(~outer)
    end = np.append(begin[1:] - len(form.between), len(text) - MARGIN)
    block, inner = inner - np.arange(len(inner)) - 1, brace[inner]
    holds_args = stands(text, form.to_args + b"{", inner - len(form.to_args))
    block, inner = block[holds_args], inner[holds_args]
    args = np.zeros(len(begin), np.int64)
    args[block] = inner
    args[np.bincount(block, minlength=len(begin)) != 1] = 0
    return _Blocks(begin, end, args)


def _timed(text: bytes, form: _Form, blocks: _Blocks) -> _Timed:
    """The blocks that have the form, read backwards from their arguments to their heads."""
    block = np.flatnonzero(blocks.args)
    args, args_end = blocks.args[block], blocks.end[block] - len(form.closes)
    duration, length = thousandths_before(text, args - len(form.to_args))
    ts_end = args - len(form.to_args) - length - len(form.to_dur)
    start, ts_length = thousandths_before(text, ts_end)
    head_end = ts_end - ts_length - len(form.to_ts)
    has_form = (length > 0) & (duration < _LONGEST_NS) & stands(text, form.to_dur, ts_end)
    has_form &= (ts_length > 0) & stands(text, form.to_ts, head_end)
    has_form &= (args <= args_end) & stands(text, form.closes, args_end)
    timed = _Timed(block, blocks.begin[block], head_end, args, args_end, start, duration)
    return timed if has_form.all() else timed.only(has_form)


@dataclass(slots=True)
class Scanned:
    """The events of a piece.

    Attributes:
        columns: the events with a duration.
        others: the events without a duration.
        recorded: the number of all events.
    """

    columns: Columns
    others: list[Any]
    recorded: int


def _decoded(blocks: list[bytes]) -> list[Any]:
    """Decode texts, each of which must be one JSON object."""
    text = b"[%b]" % b",".join(blocks)
    if [*map(len, _RAW.decode(text))] != [*map(len, blocks)]:
        raise _UnprovenError
    return decode(text)


class Scanner:
    """Scans the pieces of one file, in order, into columns.

    `columns_of` makes columns of decoded events. It is called for one event of each kind. All
    events of the kind get the same cells, except for the numbers, which each event has itself.
    """

    def __init__(self, columns_of: Callable[[list[Complete]], Columns]) -> None:
        self._columns_of = columns_of
        self._columns = columns_of([])
        self._form: _Form | None = None
        self._members = Members(_COLUMNS, _DECODED)
        self._kinds = _Kinds()
        self._failures, self._to_skip = 0, 0

    def scan(self, text: bytes) -> Scanned | None:
        """Scan a JSON list of events between two margins; None if it must be decoded."""
        if self._to_skip:
            self._to_skip -= 1
            return None
        self._form = self._form or _learned(text)
        try:
            found = None if b"\\" in text or self._form is None else self._scan(text, self._form)
        except (_UnprovenError, *BAD):
            found = None
        if found is None:
            self._kinds.forget(len(self._columns["name"]))
            self._failures, self._form = min(self._failures + 1, 5), None
            self._to_skip = 2**self._failures - 1
        else:
            self._failures = max(self._failures - 1, 0)
        return found

    def _scan(self, text: bytes, form: _Form) -> Scanned:
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.forget(0)
            self._columns = self._columns_of([])
        blocks = _blocks(text, form)
        timed = _timed(text, form, blocks)
        members, rest, rest_end = self._members.read(text, timed.args, timed.args_end)
        kind = np.full(len(blocks.begin), _ODD)
        kind[timed.block] = self._kinds_of(text, timed, rest, rest_end)
        scanned = kind[timed.block] != _ODD
        once = np.count_nonzero(~scanned) + max(len(self._new()) - _FEW_KINDS, 0)
        if 3 * (np.count_nonzero(scanned) - 2 * once) < len(kind):
            raise _UnprovenError  # too little of the piece repeats: decoding is faster
        others = self._decode_odd(text, blocks, kind)
        every = np.arange(len(scanned))
        members += [
            ("start_ns", every, timed.start_ns),
            ("end_ns", every, timed.start_ns + timed.duration_ns),
        ]
        if not scanned.all():
            members = [
                (name, which[scanned[which]], values[scanned[which]])
                for name, which, values in members
            ]
        at = (np.cumsum(kind != _ODD) - 1)[timed.block]
        numbers = [(name, at[which], values) for name, which, values in members]
        return Scanned(self._columns_at(kind[kind != _ODD], numbers), others, len(kind))

    def _decode_odd(self, text: bytes, blocks: _Blocks, kind: Ints) -> list[Any]:
        """Decode blocks without a kind: events with a duration become kinds; returns the others."""
        odd = np.flatnonzero(kind == _ODD)
        places = zip(blocks.begin[odd].tolist(), blocks.end[odd].tolist())
        decoded = _decoded([text[begin:end] for begin, end in places])
        spans = [k for k, event in enumerate(decoded) if type(event) is Complete]
        kind[odd[spans]] = [self._kinds.single(decoded[k]) for k in spans]
        return [event for event in decoded if type(event) is not Complete]

    def _kinds_of(self, text: bytes, timed: _Timed, rest: Ints, rest_end: Ints) -> Ints:
        """The kind of each event, by its head and by the rest of its arguments, if any."""
        if np.any(rest > rest_end):
            raise _UnprovenError
        kinds = self._kinds
        heads = zip(timed.begin.tolist(), timed.head_end.tolist())
        kind = np.fromiter([kinds[text[begin:end]] for begin, end in heads], np.int64, len(rest))
        more = np.flatnonzero(rest < rest_end)
        before = [_FOLLOWS if follows else b"" for follows in (rest > timed.args)[more].tolist()]
        rests = zip(kind[more].tolist(), before, rest[more].tolist(), rest_end[more].tolist())
        kind[more] = [kinds[head, numbers + text[begin:end]] for head, numbers, begin, end in rests]
        return kind

    def _new(self) -> list[Complete]:
        """The kinds that have no columns yet."""
        return self._kinds.events[len(self._columns["name"]) :]

    def _columns_at(self, kind: Ints, numbers: list[tuple[str, Ints, Ints]]) -> Columns:
        """The columns of each event: those of its kind, with the event's own numbers."""
        if new := self._new():
            known = len(self._columns["name"])
            # in the order of their first events, because the decoder numbers names in this order
            first = np.full(len(new), len(kind))
            met = np.flatnonzero(kind >= known)
            np.minimum.at(first, kind[met] - known, met)
            order = np.argsort(first, kind="stable")
            found, place = self._columns_of([new[k] for k in order.tolist()]), np.argsort(order)
            self._columns = {
                name: np.append(column, found[name][place])
                for name, column in self._columns.items()
            }
        columns = {name: column[kind] for name, column in self._columns.items()}
        for name, which, values in numbers:
            columns[name][which] = values
        return columns
