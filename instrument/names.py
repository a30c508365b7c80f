"""Range names as a trace can hold them.

Kineto writes a quotation mark into its JSON as it is, which ruins the whole file, turns a backslash into a slash, and
replaces a name that is not printable ASCII by "unknown". Such a name travels percent-encoded behind a mark, and is put
back when the trace is read.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

#: What a resumed coroutine or generator adds to its range's name; the read half takes both as one range.
RESUMED = " (resumed)"

_MARK = "utf8:"
_SAFE = "".join(map(chr, range(32, 127))).translate(str.maketrans("", "", '"\\%'))


def to_trace(name: str) -> str:
    """The name in characters that Kineto leaves alone; most names are that already."""
    if name.isascii() and name.isprintable() and not name.startswith(_MARK) and '"' not in name and "\\" not in name:
        return name
    return _MARK + quote(name, _SAFE, errors="surrogatepass")


def from_trace(name: str) -> str:
    """The name that `to_trace` was given."""
    if not name.startswith(_MARK):
        return name
    return unquote(name.removeprefix(_MARK), errors="surrogatepass")
