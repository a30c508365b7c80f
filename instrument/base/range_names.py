"""Encode the names of ranges for a trace, and decode them.

Kineto does not escape quotation marks: one quotation mark in a name makes the whole JSON file
invalid. Kineto also turns backslashes into slashes, and replaces names that are not printable ASCII
by "unknown". `to_trace` therefore percent-encodes such names after the prefix "utf8:", and
`from_trace` decodes the names. The names of torch's steps begin with "ProfilerStep#". `to_trace`
also encodes names of the user's ranges that begin with "ProfilerStep#".
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

#: When a coroutine or generator resumes, its new range has this suffix. When the trace is read, the
#: new range is merged with the range before the suspension.
RESUMED = " (resumed)"

#: The suffix of a mark (`instrument.mark`). Kineto has no instant events for users, so a mark is a
#: range without a duration.
MOMENT = " (mark)"

#: torch's name for the range of a step, without the number of the step.
STEP_PREFIX = "ProfilerStep#"
#: The name of the row for whole steps, in timings and in the operator table.
STEP = "ProfilerStep*"

#: torch's name for the range of an optimizer's step, without the optimizer's class.
OPTIMIZER_STEP = "Optimizer.step#"

#: When a trace is read, a range that activation checkpointing runs again gets this suffix.
RECOMPUTED = " (recomputed)"

#: torch's name for the range of a compiled region, without the number of the region.
REGION = "Torch-Compiled Region: "
#: What the names of torch's ranges and operators that run compiled code contain.
COMPILED_CODE = re.compile(r"CompiledFunction|Torch-Compiled Region|## Call CompiledFxGraph")

_ENCODED = "utf8:"
_SAFE = "".join(map(chr, range(32, 127))).translate(str.maketrans("", "", '"\\%'))


def whole(name: str) -> str:
    """Return a user's name in which each lone surrogate is replaced by its escape.

    Python decodes what is not UTF-8, such as a file's name, to lone surrogates. UTF-8 and JSON
    cannot hold them.
    """
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def to_trace(name: str) -> str:
    """Encode a name so that Kineto does not change it; most names stay as they are.

    See `whole` for lone surrogates in a name.
    """
    name = whole(name)
    if name.startswith(STEP_PREFIX):
        return f"{_ENCODED}%{ord(name[0]):X}{quote(name[1:], _SAFE)}"
    is_plain = name.isascii() and name.isprintable() and '"' not in name and "\\" not in name
    if is_plain and not name.startswith(_ENCODED):
        return name
    return _ENCODED + quote(name, _SAFE)


def from_trace(name: str) -> str:
    """Decode a name that `to_trace` encoded; other names stay as they are."""
    if not name.startswith(_ENCODED):
        return name
    return unquote(name.removeprefix(_ENCODED))


def shown(name: str) -> str:
    """Decode the name of a range as `from_trace` does, for a reader.

    A name that the user gave can begin with "ProfilerStep#", as torch's names of steps do. Such a
    name gets quotation marks around it.
    """
    given = from_trace(name)
    return f"'{given}'" if given != name and given.startswith(STEP_PREFIX) else given
