"""Kineto's own layout, scanned in numpy without decoding what repeats.

A profile says the same few hundred things again and again with other numbers. Which text stands
between the numbers is learned from the file, as it changed between versions of torch; the numbers
are read for all events of a piece at once, and what else an event says is decoded once for each
distinct text.

Nothing is taken on trust. A piece is cut into blocks from one event's brace to the next one's. Of a
block that is scanned every byte is accounted for: its head and the rest of its arguments were
decoded as JSON objects, and around them stand plain numbers and texts learned from a block that is
of this form. Any other block is decoded by itself and must be one JSON object. So the piece is the
list of these objects and no other; where that cannot be shown there is no result. Text with a
backslash is not scanned at all.
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

# Bytes around a piece: so far beyond its ends may be looked for literals and numbers, four each in
# a row.
MARGIN = 4 * 64
_LONGEST_NS = 2**43 * 1000  # of a duration: up to here floats are exact as well
_ODD = -1  # in the place of a kind: to be decoded by itself
_MOST_KINDS, _FEW_KINDS = 1 << 14, 1 << 8
# Blanks are bounded, as otherwise a search through many would take the square of their number.
_FORM = re.compile(
    rb'\{\s{0,64}"ph":\s{0,9}"X",[^{}]*?'
    rb'(?P<to_ts>,\s{0,64}"ts":\s{0,9})\d+(?:\.\d{1,3})?'
    rb'(?P<to_dur>,\s{0,64}"dur":\s{0,9})\d+(?:\.\d{1,3})?'
    rb'(?P<to_args>\s{0,64},\s{0,64}"args":\s{0,9})\{[^{}]*?'
    rb"(?P<closes>\s{0,64}\}\s{0,64}\})(?P<between>\s{0,9},\s{0,64})\{"
)
# The whole numbers that nearly every event has its own of, and the columns that they become.
_COLUMNS = {
    b"External id": "external_id",
    b"correlation": "correlation",
    b"Sequence number": "sequence",
    b"Fwd thread id": "forward_thread",
    b"Python id": "python_id",
    b"Python parent id": "python_parent",
}
# What else is kept is left to the decoder.
_DECODED = {field.encode_name.encode() for field in msgspec.structs.fields(Args)} - _COLUMNS.keys()
_FOLLOWS = b'{"":""'  # in the place of the numbers before a rest
_IDS = [b'"%b"' % key for key in (*_COLUMNS, b"external id")]
_HEAD = msgspec.json.Decoder(Head)
_RAW = msgspec.json.Decoder(list[msgspec.Raw])
_ARGS = msgspec.json.Decoder(Args)

Columns = dict[str, NDArray[Any]]


class _UnprovenError(ValueError):
    """A text that does not say what its place asks for."""


@dataclass(frozen=True, slots=True)
class _Form:
    """The texts that stand between the parts of an event, as a file's own events have them."""

    to_ts: bytes
    to_dur: bytes
    to_args: bytes
    closes: bytes
    between: bytes


def _learned(text: bytes) -> _Form | None:
    """The form of the first event that has one.

    Wrong or not, an event is scanned only where it has it too.
    """
    found = _FORM.search(text)
    if found is None or max(map(len, found.groups())) >= LONGEST_LITERAL:
        return None
    return _Form(**found.groupdict())


class _Kinds(dict[Any, int]):
    """The position of each kind.

    By the text of its head, or by the kind of the head and the text of the arguments.
    """

    def __init__(self) -> None:
        self.events: list[Complete] = []

    def __missing__(self, key: Any) -> int:
        event = _headed(key) if isinstance(key, bytes) else _with_rest(self.events[key[0]], key[1])
        return _ODD if event is None else self._add(key, event)

    def single(self, event: Complete) -> int:
        """The position of an event that is a kind by itself."""
        return self._add(len(self), event)

    def _add(self, key: Any, event: Complete) -> int:
        self.events.append(event)
        position = self[key] = len(self)
        return position

    def forget(self, after: int) -> None:
        """Drop the kinds from a position on."""
        del self.events[after:]
        while len(self) > after:
            self.popitem()


def _headed(text: bytes) -> Complete:
    """The event that begins with a text, `{` up to the comma before its time."""
    if text.count(b'"ph"') != 1:
        raise _UnprovenError
    head = _HEAD.decode(text + b"}")
    return Complete(name=head.name, pid=head.pid, tid=head.tid, cat=head.cat)


def _with_rest(event: Complete, args: bytes) -> Complete | None:
    """An event with its arguments but for the last `}`; those of `_FOLLOWS` follow on numbers.

    None where one of these may be told again: which of the two counts is for the decoder to say.
    """
    if args.startswith(_FOLLOWS) and any(key in args for key in _IDS):
        return None
    return msgspec.structs.replace(event, args=_ARGS.decode(args + b"}"))


@dataclass(slots=True)
class _Blocks:
    """Where each event of a piece begins and ends, and where its arguments begin.

    0 where it is not of the form.
    """

    begin: Ints
    end: Ints
    args: Ints


@dataclass(slots=True)
class _Timed:
    """The events that have the form: which of the blocks they are, and where their parts stand."""

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
    """Cut a piece where one event seems to end and the next to begin.

    That it is so is for the caller to show.
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
    """The blocks that have the form, read from their arguments back to their heads."""
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
    """A piece's events.

    Those with a duration as columns, those without, and how many there are of all kinds.
    """

    columns: Columns
    others: list[Any]
    recorded: int


def _decoded(blocks: list[bytes]) -> list[Any]:
    """The events of texts each of which is a JSON object."""
    text = b"[%b]" % b",".join(blocks)
    if [*map(len, _RAW.decode(text))] != [*map(len, blocks)]:
        raise _UnprovenError
    return decode(text)


class Scanner:
    """Scans the pieces of one file, in order, into columns.

    `columns_of` makes columns of decoded events; what it gives for one event of a kind is taken for
    all of them, but for the numbers that each has of its own.
    """

    def __init__(self, columns_of: Callable[[list[Complete]], Columns]) -> None:
        self._columns_of = columns_of
        self._columns = columns_of([])
        self._form: _Form | None = None
        self._members = Members(_COLUMNS, _DECODED)
        self._kinds = _Kinds()
        self._failures, self._to_skip = 0, 0

    def scan(self, text: bytes) -> Scanned | None:
        """The events of a JSON list between two margins; None where they have to be decoded."""
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
            raise _UnprovenError  # it may be true, but too little of it repeats: decoding is faster
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
        """Decode what has no kind: events with a duration become kinds, the others are returned."""
        odd = np.flatnonzero(kind == _ODD)
        places = zip(blocks.begin[odd].tolist(), blocks.end[odd].tolist())
        decoded = _decoded([text[begin:end] for begin, end in places])
        spans = [k for k, event in enumerate(decoded) if type(event) is Complete]
        kind[odd[spans]] = [self._kinds.single(decoded[k]) for k in spans]
        return [event for event in decoded if type(event) is not Complete]

    def _kinds_of(self, text: bytes, timed: _Timed, rest: Ints, rest_end: Ints) -> Ints:
        """The kind of each event by its head, and by the rest of its arguments if it has one."""
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
        """Each event's columns: those of its kind, with its own numbers in their places."""
        if new := self._new():
            known = len(self._columns["name"])
            # In the order in which they are met, as the decoder would meet them: so are their names
            # numbered.
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
