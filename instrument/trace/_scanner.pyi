"""Reads the events of a trace from its JSON text. Only `instrument.trace.scanner` uses it."""

ARGS: list[str]

# In this order: the number of events; the rows and the kinds of events with a duration; the rows
# and the kinds of memory events; the kinds of other instant events; the events with the phase B or
# E, as JSON objects with a comma after each; the distinct shapes, concrete inputs, types and call
# stacks.
_Found = tuple[
    int,
    bytes,
    list[bytes],
    bytes,
    list[bytes],
    list[bytes],
    bytes,
    tuple[list[bytes], list[bytes], list[bytes], list[bytes]],
]

def scan(text: bytes, begin: int, end: int, /) -> _Found | None: ...
