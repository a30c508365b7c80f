"""JSON as the commands print it: one object, which says the version of its keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: The version of the keys of all commands. It increases when a key is removed or changes its
#: meaning. A new key does not change the version.
VERSION = 1


def json_text(content: Mapping[str, Any]) -> str:
    """Return an object as JSON. Values that JSON does not know, such as dates, become text."""
    return json.dumps({"version": VERSION, **content}, indent=2, default=str)
