"""Answers to queries in SQL over the tables `events` and `segments`."""

from __future__ import annotations

import re
from difflib import get_close_matches

import polars as pl
from polars import selectors as cs

from instrument.base.errors import ConfigError
from instrument.read.facts.expressions import reason_of, refuse_files
from instrument.read.facts.facts import EVENTS, Facts
from instrument.read.facts.schema import names_of
from instrument.read.facts.segments import SEGMENTS
from instrument.read.trace.events import Flags

_QUERY = re.compile(r"\s*(select|with)\b", re.IGNORECASE)
_HAS_NO_ORDER = re.compile(r"\b(group\s+by|join|distinct|union|intersect|except)\b", re.IGNORECASE)
_ORDERS = re.compile(r"\border\s+by\b", re.IGNORECASE)
# What may name columns that are not written in the query.
_EVERY_COLUMN = re.compile(r"\*|\bnatural\b|\bcolumns\b|\btable\b", re.IGNORECASE)


# Cells of an answer are numbers, text, true or false, or lists; a division by zero is unknown.
_FINITE = pl.when(cs.float().is_finite()).then(cs.float())
_plain = (
    cs.decimal().cast(pl.Float64),
    _FINITE.name.keep(),
    (cs.temporal() - cs.duration()).cast(pl.String),
    cs.duration().dt.total_nanoseconds(),
    cs.binary().cast(pl.String, strict=False),
)


def answer(facts: Facts, query: str, chosen: Flags) -> pl.DataFrame:
    """Return the rows of a query; `chosen` is a mask of the events that it is about.

    Only columns of events whose names are in the query are computed.

    Raises:
        ConfigError: the text is no single query, reads something else, or polars refuses it.
    """
    refuse_files(query)
    if not _QUERY.match(query):
        raise ConfigError(f"{query!r} is not a query: it must begin with SELECT or WITH.")
    words = set(re.findall(r"\w+", query))
    every, all_named = names_of(EVENTS), _EVERY_COLUMN.search(query)
    named = [name for name in every if all_named or name in words]
    tables: dict[str, pl.DataFrame] = {}
    if "events" in words:
        tables["events"] = facts.events(*(named or ["id"])).filter(pl.Series(chosen))
    if "segments" in words:
        tables["segments"] = facts.segments()
    try:
        with pl.SQLContext(tables, eager=True) as context:
            found = context.execute(query).with_columns(_plain)
    except pl.exceptions.ColumnNotFoundError as error:
        name = str(error).split('"')[1] if '"' in str(error) else ""
        near = get_close_matches(name, [*every, *names_of(SEGMENTS)], 1)
        hint = f"Did you mean {near[0]}?" if near else "docs/tables.md lists the columns."
        raise ConfigError(
            f"The query {query!r} names a column {name!r}, which its tables do not have. {hint}"
        ) from None
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = reason_of(error)
        raise ConfigError(
            f"The query {query!r} cannot be answered: {reason}. The tables are events and segments."
        ) from None
    if _HAS_NO_ORDER.search(query) and not _ORDERS.search(query):
        # Otherwise the order of groups and joins would depend on the number of threads.
        plain = [name for name, dtype in found.schema.items() if not dtype.is_nested()]
        found = found.sort(plain, maintain_order=True) if plain else found
    return found
