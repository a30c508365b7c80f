"""Leave names of files, users and hosts out of a payload."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_HIDDEN, _FILE = "***", "(file)"
_NAME = r"[\w.+@~<>$%-]"
# Four forms of names of files: a text that is a Python frame or a place in a source file, whose
# folders may have blanks; a source file with its line, as torch and Python write it, such as
# train.py:31 or torch/nn/module.py(75); a URL; a path that begins at the root, a home or a drive.
# The path of a range begins with a name. A match begins only where a word does, so that a long name
# takes linear time.
_FILES = re.compile(
    r"\A[^;<>]+?\.pyx?(?:\(\d+\)(?=: )|:\d+(?=(?: in \S+)?\Z))"
    r"|(?<![\w.+@~<>$%/\\-])(?:[A-Za-z]:)?"
    rf"(?:{_NAME}*[/\\])*{_NAME}+\.(?:pyx?|ipynb|cpp|cc|cu|cuh|c|h|hpp|so|gz|json)"
    r"(?![\w.])(?::\d+|\(\d+\))?"
    r"|(?<![a-z0-9+.])[a-z][a-z0-9+.]*://\S+"
    rf"|(?<![\w/\\.~])(?:~|[A-Za-z]:)?(?:[/\\]{_NAME}+){{2,}}[/\\]?"
)


def redacted(payload: Any, names: Iterable[str]) -> Any:
    """Return a payload without names of files, and without some other names.

    A file is recognised by the form of its name. Names of ranges, operators, kernels and Python
    functions stay. The payload never holds the command that started the run.

    Args:
        payload: JSON values.
        names: the names of hosts, the paths of the captures, and other words to hide.
    """
    chosen = sorted({name for name in names if name}, key=len, reverse=True)
    words = "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in chosen)
    hidden = re.compile(words or "(?!)")

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return _FILES.sub(_FILE, hidden.sub(_HIDDEN, value))
        if isinstance(value, Mapping):
            return {key: clean(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [clean(each) for each in value]
        return value

    return clean(payload)
