"""How names of ranges are encoded in a trace.

Kineto does not escape quotation marks in its JSON, which makes the whole file invalid; it turns
backslashes into slashes, and names that are not printable ASCII into "unknown". `to_trace` writes
such names percent-encoded after a prefix, and `from_trace` decodes them. It also encodes a user's
name that begins like torch's name of a step.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

#: The suffix of a range of a resumed coroutine or generator; the read half merges it with its first
#: part.
RESUMED = " (resumed)"

#: The suffix of a mark. Kineto has no instant events for users, so a mark is a range of no length.
MOMENT = " (mark)"

#: The prefix of torch's ranges of steps, before the number.
STEP_PREFIX = "ProfilerStep#"

#: The suffix that the reader adds to ranges that activation checkpointing runs again.
RECOMPUTED = " (recomputed)"

#: The prefix of torch's ranges of compiled code, before the number of the region.
REGION = "Torch-Compiled Region: "

_ENCODED = "utf8:"
_SAFE = "".join(map(chr, range(32, 127))).translate(str.maketrans("", "", '"\\%'))


def to_trace(name: str) -> str:
    """The name in characters that Kineto does not change; most names stay as they are."""
    if name.startswith(STEP_PREFIX):
        return f"{_ENCODED}%{ord(name[0]):X}{quote(name[1:], _SAFE, errors='surrogatepass')}"
    is_plain = name.isascii() and name.isprintable() and '"' not in name and "\\" not in name
    if is_plain and not name.startswith(_ENCODED):
        return name
    return _ENCODED + quote(name, _SAFE, errors="surrogatepass")


def from_trace(name: str) -> str:
    """The name that `to_trace` encoded."""
    if not name.startswith(_ENCODED):
        return name
    return unquote(name.removeprefix(_ENCODED), errors="surrogatepass")


def shown(name: str) -> str:
    """Like `from_trace`, with quotes around a user's name that looks like that of a step."""
    given = from_trace(name)
    return f"'{given}'" if given != name and given.startswith(STEP_PREFIX) else given
