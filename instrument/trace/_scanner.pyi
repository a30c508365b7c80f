"""Reads the events of a trace from its JSON text; see `scanner`, which is its only user."""

ARGS: list[str]

# The number of events; rows and kinds of events with a duration, and of memory events; kinds of other
# events without a duration; events that begin or end, as JSON objects with a comma behind each; the
# distinct texts.
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
