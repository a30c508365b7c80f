"""Replace the names of files and other private words in a payload."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_HIDDEN, _FILE = "***", "(file)"
_NAME = r"[\w.+@~<>$%-]"
# The pattern matches four forms:
# - a whole text that is a Python frame or a place in a source file; its folders may have spaces;
# - a source file, also with its line as torch and Python write it, such as train.py:31 or
#   torch/nn/module.py(75);
# - a URL;
# - a path that begins at the root, a home folder or a drive. The path of a range does not match,
#   because it begins with a name.
# A match begins only at the start of a word, so that a long name takes linear time.
_FILES = re.compile(
    r"\A[^;<>]+?\.pyx?(?:\(\d+\)(?=: )|:\d+(?=(?: in \S+)?\Z))"
    r"|(?<![\w.+@~<>$%/\\-])(?:[A-Za-z]:)?"
    rf"(?:{_NAME}*[/\\])*{_NAME}+\.(?:pyx?|ipynb|cpp|cc|cu|cuh|c|h|hpp|so|gz|json)"
    r"(?![\w.])(?::\d+|\(\d+\))?"
    r"|(?<![a-z0-9+.])[a-z][a-z0-9+.]*://\S+"
    rf"|(?<![\w/\\.~])(?:~|[A-Za-z]:)?(?:[/\\]{_NAME}+){{2,}}[/\\]?"
)


def redacted(payload: Any, names: Iterable[str]) -> Any:
    """Replace URLs and names of files in a payload by "(file)", and the `names` by "***".

    File names are recognised by their form. A user's name is hidden only as a part of a path. Names
    of ranges, operators, kernels and Python functions are not replaced.

    Args:
        payload: JSON values.
        names: the words to hide, such as hosts, commands and the paths of captures.
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
