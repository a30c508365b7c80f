"""Reads members of many JSON objects at once, if they are whole numbers and their keys repeat.

Each object is read from the front, one number after another. Then one number is read from the back.
The text between them is the rest, which this module does not read. It learns the keys, and the
blanks around them, from the objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set

import numpy as np

from instrument.trace.digits import stands, whole_after, whole_before
from instrument.trace.events import Ints

LONGEST_LITERAL = 64
_MOST_LITERALS = 64
_MOST_TURNS = 32
_SAMPLES = 16
# Keys of printable ASCII characters without quotes and backslashes, which are always valid JSON.
_MEMBER = re.compile(rb'[{,]\s*"([ !#-\[\]-~]*)":\s*(?=(\d+))')
_LAST_MEMBER = re.compile(rb',\s*"([ !#-\[\]-~]*)":\s*(?=\d+\Z)')

Numbers = tuple[str, Ints, Ints]
_Literals = dict[bytes, bytes]


class Members:
    """Reads the objects in the pieces of one file.

    `columns` gives the column for each key whose numbers are returned. The decoder reads the keys
    in `left`. The numbers of all other keys are skipped.
    """

    def __init__(self, columns: Mapping[bytes, str], left: Set[bytes]) -> None:
        self._columns, self._left = columns, left
        self._first: _Literals = {}
        self._last: _Literals = {}

    def read(self, text: bytes, begin: Ints, end: Ints) -> tuple[list[Numbers], Ints, Ints]:
        """Read the numbers of the objects from the `{` at `begin` to before the `}` at `end`.

        Returns the numbers, each with the index of its object, and the positions at which the rest
        of each object begins and ends. All text outside the rest consists of complete members, each
        with the `{` or comma before it. So the object is valid JSON if its rest is valid JSON
        between `{"":""` and `}`, or, if the rest is the whole object, before a `}`.
        """
        at, stop = begin.copy(), end.copy()
        found = [*self._take_first(text, begin, at, end)]
        rest = np.flatnonzero(at < end)
        self._learn_last(text, at[rest], end[rest])
        for literal, key in self._last.items():
            value, length = whole_before(text, end[rest])
            before = end[rest] - length - len(literal)
            hit = (
                (length > 0)
                & (before > at[rest])
                & (at[rest] > begin[rest])
                & stands(text, literal, before)
            )
            stop[rest[hit]] = before[hit]
            if key in self._columns:
                found.append((self._columns[key], rest[hit], value[hit]))
            rest = rest[~hit]
        return found, at, stop

    def _take_first(self, text: bytes, begin: Ints, at: Ints, end: Ints) -> Iterator[Numbers]:
        """Read the numbers at the front of each object, and move `at` behind them."""
        rest = np.arange(len(at))
        for turn in range(_MOST_TURNS):
            moved = False
            for literal, key in list(self._first.items()):
                open_ones = rest[at[rest] == begin[rest]] if literal.startswith(b"{") else rest
                hit = open_ones[stands(text, literal, at[open_ones])]
                value, length = whole_after(text, at[hit] + len(literal))
                if not (understood := length > 0).all():
                    hit, value, length = hit[understood], value[understood], length[understood]
                if not len(hit):
                    continue
                at[hit] += length + len(literal)
                moved = True
                if key in self._columns:
                    yield self._columns[key], hit, value
                if turn:  # in the objects, it follows literals that were learned later
                    self._first[literal] = self._first.pop(literal)
            rest = rest[at[rest] < end[rest]]
            if not len(rest) or not (self._learn_first(text, at[rest], end[rest]) or moved):
                return

    def _learn_first(self, text: bytes, begin: Ints, end: Ints) -> bool:
        """Learn literals from the front of some rests; returns whether there were new ones."""
        before = len(self._first)
        for first, last in _some(begin, end):
            at, literal, key = first, b"", b""
            while (found := _MEMBER.match(text, at, last)) and found[1] not in self._left:
                if literal and not found[0].startswith(b","):
                    break
                literal, key, at = text[first : found.end()], found[1], found.end(2)
                if key in self._columns or found[2] != b"0":
                    break  # an unwanted 0 becomes part of the literal of the next key
            if literal:
                _add(self._first, literal, key)
        return len(self._first) > before

    def _learn_last(self, text: bytes, begin: Ints, end: Ints) -> None:
        for first, last in _some(begin, end):
            found = _LAST_MEMBER.search(text[max(first, last - 2 * LONGEST_LITERAL) : last])
            if found and found[1] not in self._left:
                _add(self._last, found[0], found[1])


def _add(known: _Literals, literal: bytes, key: bytes) -> None:
    if len(known) < _MOST_LITERALS and len(literal) <= LONGEST_LITERAL:
        known.setdefault(literal, key)


def _some(begin: Ints, end: Ints) -> Iterator[tuple[int, int]]:
    step = len(begin) // _SAMPLES + 1
    return zip(begin[::step].tolist(), end[::step].tolist())
