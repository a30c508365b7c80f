"""Combine a payload, the scripts and the style sheets of the page into one HTML file."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from instrument.read.views.templates import render

#: The folder of the scripts and style sheets, as a path in the package.
ASSETS = "read/show/assets/page"
# The level of gzip. Level 4 takes twice as long, for a payload that is 6 to 17 % smaller.
_LEVEL = 1
# These scripts come before those of the sections that are not made of parts.
_COMMON = ("page.js", "parts.js", "table.js", "canvas.js")
_STYLES = ("page.css", "canvas.css")


def document(payload: Mapping[str, Any], scripts: Iterable[str], styles: Iterable[str] = ()) -> str:
    """Return the page of a payload: one HTML file that loads no other file.

    Its content security policy allows only its own script and style sheet. The same arguments give
    the same page.

    Args:
        payload: JSON values. `title` is the title of the page. `sections` maps the name of each
            section to its data, in the order of the page.
        scripts: the scripts that draw these sections, as paths in the package.
        styles: additional style sheets, as paths in the package.
    """
    try:
        text = msgspec.json.encode(payload)
    except (TypeError, UnicodeEncodeError):
        # numpy's numbers, or a name in the trace with half a character, which UTF-8 cannot hold
        text = json.dumps(payload, separators=(",", ":")).encode()
    return render(
        "read/show/templates/report.html",
        title=payload["title"],
        styles=[*(f"{ASSETS}/{name}" for name in _STYLES), *styles],
        scripts=[*(f"{ASSETS}/{name}" for name in _COMMON), *scripts],
        payload=b64encode(gzip.compress(text, _LEVEL, mtime=0)).decode(),
    )
