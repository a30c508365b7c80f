"""Reads the events of a trace from its JSON text. Only `instrument.read.trace.scanner` uses it."""

ARGS: list[str]

# The number of rows, and the values of each column; one value if all values are equal.
_Column = tuple[int, list[bytearray]]
_Texts = tuple[list[bytes], list[bytes], list[bytes], list[bytes]]

class Scanner:
    def scan(self, text: bytes, begin: int, end: int, /) -> bool: ...

class Columns:
    # The number of events, that of counter events, and JSON lists without their brackets: the new
    # kinds of events with a duration, of memory events and of other instant events.
    def add(self, piece: Scanner, /) -> tuple[int, int, bytes, bytes, bytes] | None: ...
    # The bytes that the kinds and texts take.
    def keep(self, piece: Scanner, /) -> int: ...
    # The events with a duration, the memory events, and the distinct shapes, concrete inputs, types
    # and call stacks.
    def take(self) -> tuple[_Column, _Column, _Texts]: ...
