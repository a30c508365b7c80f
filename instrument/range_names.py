"""Range names as a trace can hold them.

Kineto writes a quotation mark into its JSON as it is, which ruins the whole file, turns a backslash into a slash, and
replaces a name that is not printable ASCII by "unknown". Such a name travels percent-encoded behind a mark, and is put
back when the trace is read. So does one that begins as torch's names of steps do, and is none of a step.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

#: What a resumed coroutine or generator adds to its range's name; the read half takes both as one range.
RESUMED = " (resumed)"

#: How the name of a moment ends that was marked: Kineto takes no moments from its users, so it is a range of no length.
MOMENT = " (mark)"

#: How the ranges of steps begin, which the profiler numbers.
STEP_PREFIX = "ProfilerStep#"

#: What activation checkpointing runs once more has this behind its range's name, where a trace is read.
RECOMPUTED = " (recomputed)"

#: How torch names the calls of compiled code, with the number of the region behind it.
REGION = "Torch-Compiled Region: "

_MARK = "utf8:"
_SAFE = "".join(map(chr, range(32, 127))).translate(str.maketrans("", "", '"\\%'))


def to_trace(name: str) -> str:
    """The name in characters that Kineto leaves alone; most names are that already."""
    if name.startswith(STEP_PREFIX):
        return f"{_MARK}%{ord(name[0]):X}{quote(name[1:], _SAFE, errors='surrogatepass')}"
    if (
        name.isascii()
        and name.isprintable()
        and not name.startswith(_MARK)
        and '"' not in name
        and "\\" not in name
    ):
        return name
    return _MARK + quote(name, _SAFE, errors="surrogatepass")


def from_trace(name: str) -> str:
    """The name that `to_trace` was given."""
    if not name.startswith(_MARK):
        return name
    return unquote(name.removeprefix(_MARK), errors="surrogatepass")


def shown(name: str) -> str:
    """As `from_trace`, but a range that is called like a step stands in quotes, so that nobody takes it for one."""
    given = from_trace(name)
    return f"'{given}'" if given != name and given.startswith(STEP_PREFIX) else given
