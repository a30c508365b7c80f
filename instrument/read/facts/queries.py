"""Answers to queries in SQL over the tables `events` and `segments`."""

from __future__ import annotations

import re

import polars as pl

from instrument.base.errors import ConfigError
from instrument.read.facts.expressions import refuse_files
from instrument.read.facts.facts import EVENTS, Facts
from instrument.read.facts.schema import names_of
from instrument.read.trace.events import Flags

_QUERY = re.compile(r"\s*(select|with)\b", re.IGNORECASE)


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
    named = [name for name in names_of(EVENTS) if "*" in query or name in words]
    tables: dict[str, pl.DataFrame] = {}
    if "events" in words:
        tables["events"] = facts.events(*(named or ["id"])).filter(pl.Series(chosen))
    if "segments" in words:
        tables["segments"] = facts.segments()
    try:
        with pl.SQLContext(tables, eager=True) as context:
            return context.execute(query)
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"The query {query!r} cannot be answered: {reason}. The tables are events and segments."
        ) from None
