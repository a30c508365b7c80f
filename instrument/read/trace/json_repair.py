"""Repair JSON with the errors that Kineto is known to write.

These are NaN, bad escapes, control characters, broken UTF-8, two minus signs in one number, and
quotation marks that are not escaped.
"""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal
from typing import Any

import msgspec

# A longer text is not searched for quotation marks.
_LONGEST = 1 << 20
# Kineto writes a minus sign before both parts of a negative time, as in `"dur": -1918637.-566`.
_TWO_SIGNS = re.compile(rb'("(?:ts|dur)"\s*:\s*)-?(\d{1,20})\.-(\d{1,3})(?!\d)')
# An escape, half of a surrogate pair, or a backslash that begins no escape.
_ESCAPE = re.compile(
    r'(\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))|(\\u[0-9a-fA-F]{4})|\\"
)
# In `with_escapes`: a bracket, comma or the start of a string; the end of a key; and the end of a
# value, by what follows it. A value of an event ends before a row of complete members that leads to
# the event's end, its arguments, or another text (`next`); a name with a quotation mark hardly
# contains such a row. A value of the arguments must not end before the end of another event.
_MARK = re.compile(r'["{}\[\],]')
_KEY_END = re.compile(r'"(?=\s*:)')
_SCALAR = r'(?:-?[\dEe.+-]{1,99}|"[^"\\]{0,99}"|\w{1,9})'
_IN_EVENT = re.compile(
    rf'"(?=\s*(?:,\s*"\w{{1,32}}"\s*:\s*{_SCALAR}\s*){{0,12}}'
    r'(?:,\s*"(?P<next>args|name|cat)"\s*:\s*[{"]|\}\s*\Z))'
)
_IN_ARGS = re.compile(r'"(?=\s*(?:,\s*"[^"\\]{0,99}"\s*:|\}\s*(?:,\s*"|\}\s*\Z)))')
_IN_OBJECT = re.compile(r'"(?=\s*(?:,\s*"[^"\\]{0,99}"\s*:|\}\s*(?:[,\]}]|\Z)))')
_IN_LIST = re.compile(r'"(?=\s*(?:,\s*(?:["\[{\d-]|true|false|null)|\]\s*(?:[,\]}]|\Z)))')
_DEEPEST = 64
_UNESCAPED = re.compile(rf'{_ESCAPE.pattern}|(["\x00-\x1f])')
_EXACT = msgspec.json.Encoder(decimal_format="number")
_FORGIVING = json.JSONDecoder(
    strict=False,
    parse_constant=lambda _: None,
    parse_float=lambda text: min(max(float(text), -sys.float_info.max), sys.float_info.max),
)


def forgiving(text: bytes, *, is_event: bool = True) -> tuple[Any, str]:
    """Repair a JSON text and decode it; return the value and the repaired text.

    The backslash of an unknown escape is taken literally. Half of a surrogate pair becomes U+FFFD.
    NaN and Infinity become None, and a number beyond all floats the largest float. If a time has
    two minus signs, one is removed. If the text still is not JSON, see `with_escapes`.

    Raises:
        ValueError: the text is not JSON even after the repairs.
        RecursionError: the text is nested too deeply.
    """
    signed = _TWO_SIGNS.sub(lambda found: b"%b-%b.%03d" % (found[1], found[2], int(found[3])), text)
    plain = signed.decode("utf-8", "replace")
    repaired = _ESCAPE.sub(_literal, plain)
    try:
        return _FORGIVING.decode(repaired), repaired
    except ValueError:
        escaped = with_escapes(plain, is_event=is_event) if len(text) <= _LONGEST else None
        if escaped is None:
            raise
    return _FORGIVING.decode(escaped), escaped


def as_json(repaired: str) -> bytes:
    """Encode the text that `forgiving` repaired as valid JSON, with all digits of its numbers."""
    value = json.loads(repaired, strict=False, parse_float=Decimal, parse_constant=lambda _: None)
    return _EXACT.encode(value)


def with_escapes(text: str, *, is_event: bool = True) -> str | None:
    """Escape what torch does not escape in the strings of a JSON object, such as quotation marks.

    A quotation mark ends a string if the text after it continues the object. None if the brackets
    do not match. `is_event` says whether the object is an event of torch.
    """
    parts: list[str] = []
    opened, keys, at, is_key = "", set[str](), 0, False
    while mark := _MARK.search(text, at):
        character = mark[0]
        parts.append(text[at : mark.end()])
        at = mark.end()
        if character == '"':
            ends = _KEY_END if is_key else _value_ends(opened, is_event=is_event)
            found = (
                end for end in ends.finditer(text, at) if end.groupdict().get("next") not in keys
            )
            if (end := next(found, None)) is None:
                return None
            inside = text[at : end.start()]
            parts += (_UNESCAPED.sub(_literal, inside), '"')
            if is_key and len(opened) == 1:
                keys.add(inside)
            at, is_key = end.end(), False
        elif (is_key and character != "}") or len(opened) > _DEEPEST:
            return None
        elif character in "{[":
            opened += character
            is_key = character == "{"
        elif character == ",":
            is_key = opened[-1:] == "{"
        elif opened[-1:] + character not in ("{}", "[]"):
            return None
        else:
            opened, is_key = opened[:-1], False
            if not opened:
                return None if text[at:].strip() else "".join(parts)
    return None


def _value_ends(opened: str, *, is_event: bool) -> re.Pattern[str]:
    if is_event and len(opened) < 3 and opened[-1:] == "{":
        return _IN_EVENT if len(opened) == 1 else _IN_ARGS
    return _IN_OBJECT if opened[-1:] == "{" else _IN_LIST


def _literal(found: re.Match[str]) -> str:
    """What stands for an escape (group 1), half of a surrogate pair (2), or a bare character."""
    escape, half = found[1], found[2]
    return escape or ("\ufffd" if half else json.dumps(found[0])[1:-1])
