"""Reads the events of a trace from its JSON text. Only `instrument.read.trace.scanner` uses it."""

ARGS: list[str]

# The number of rows, and the values of each column; one value if all values are equal.
_Columns = tuple[int, list[bytearray]]
_Texts = tuple[list[bytes], list[bytes], list[bytes], list[bytes]]

class Scanner:
    # The number of events, and JSON lists without their brackets: the new kinds of events with a
    # duration, of memory events and of other instant events, the events with the phase B or E, and
    # an event without members for each counter event.
    def scan(
        self, text: bytes, begin: int, end: int, /
    ) -> tuple[int, bytes, bytes, bytes, bytes] | None: ...
    # The bytes that the kinds and texts take.
    def keep(self) -> int: ...
    # The events with a duration, the memory events, and the distinct shapes, concrete inputs, types
    # and call stacks.
    def take(self) -> tuple[_Columns, _Columns, _Texts]: ...
