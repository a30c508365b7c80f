"""Expressions of SQL over the columns of a table; none of them reads a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

import polars as pl

from instrument.base.errors import ConfigError

# polars' SQL has functions that open files or URLs, such as read_csv('…'). No column begins so.
_READS = re.compile(r"\b(?:read|scan)_\w+\W*\(|/\*|--", re.IGNORECASE)
# polars ends the process if operators are nested some thousand times, as in 1+1+1+…
_LONGEST = 5000


def refuse_files(text: str) -> None:
    """Refuse SQL that could open a file, or that polars cannot take.

    Raises:
        ConfigError: the text calls a function such as `read_csv`, or has a comment, in which a call
            could hide; it is too long; or it is not Unicode.
    """
    if len(text) > _LONGEST:
        raise ConfigError(
            f"The SQL {text[:40] + '…'!r} has {len(text):,} characters, but at most {_LONGEST:,} "
            "are allowed."
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"The SQL {text!r} has bytes that are not UTF-8.")
    if found := _READS.search(text):
        raise ConfigError(
            f"The SQL {text!r} has {found[0]!r}: functions that read files, and comments, are not "
            "allowed; only the tables events and segments can be read."
        )


def expression(text: str, columns: Sequence[str]) -> pl.Expr:
    """Return a condition in SQL, such as `device_ns > 1000000 and name like 'aten::%'`.

    Raises:
        ConfigError: the text is not an expression of SQL over these columns.
    """
    refuse_files(text)
    if re.search(r"\(\W*select\b", text, re.IGNORECASE):
        raise ConfigError(f"The condition {text!r} has a query: write an expression over columns.")
    try:
        found = pl.sql_expr(text)
    except pl.exceptions.PolarsError as error:
        reason = f"is not an expression of SQL: {str(error).splitlines()[0]}."
        raise ConfigError(f"The condition {text!r} {reason}") from None
    assert isinstance(found, pl.Expr)
    if found.meta.has_multiple_outputs():
        raise ConfigError(f"The condition {text!r} names several columns at once: name each.")
    for name in found.meta.root_names():
        if name not in columns:
            near = get_close_matches(name, columns, 1)
            hint = f"did you mean {near[0]}?" if near else f"columns are {', '.join(columns)}."
            raise ConfigError(f"The condition {text!r} names no column {name!r}: {hint}")
    return found


def rows_where(text: str, frame: pl.DataFrame) -> pl.Series:
    """Return a mask of the rows for which a condition in SQL holds; it does not for a null.

    Raises:
        ConfigError: the text is not an expression of SQL over the columns, or its values are not
            true or false.
    """
    condition = expression(text, frame.columns).alias("")
    try:
        found = frame.with_columns(condition)[""]
    except pl.exceptions.PolarsError as error:
        raise ConfigError(f"The condition {text!r} cannot be used: {reason_of(error)}.") from None
    if found.dtype not in (pl.Boolean, pl.Null):
        raise ConfigError(f"The condition {text!r} is not true or false: write a comparison.")
    return found.cast(pl.Boolean).fill_null(False)


def reason_of(error: Exception) -> str:
    """The first sentence of an error of polars."""
    first, *others = str(error).split("\n\n")[0].splitlines()
    return " ".join([first, *(line.strip() for line in others[-1:])]).rstrip(".")
