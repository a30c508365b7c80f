"""The comparison of the ranks of a window, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from instrument.base.errors import ConfigError, did_you_mean
from instrument.base.units import counted, duration, percent, rate
from instrument.read.ranks.collective_comparison import slow_groups
from instrument.read.ranks.run import SCHEMAS, Ranks
from instrument.read.show.text import view_part
from instrument.read.views.json_text import json_text
from instrument.read.views.layout import plain
from instrument.read.views.section import Part, Section, is_every_column
from instrument.read.views.table import Table, known_columns

# The text about a straggler names a range if the range causes at least this fraction of the
# difference between the straggler and the median rank.
_LEAST_EXPLAINED = 0.1
_MOST_SLOW_LINKS = 5
_OF_RANGES = (
    "path", "ranks", "calls", "cpu_min_ns", "cpu_median_ns", "cpu_max_ns", "slowest", "spread",
    "device_median_ns", "device_max_ns",
)  # fmt: skip

#: What the keys of the JSON mean, besides the tables.
JSON_KEYS = {
    "name": "the window",
    "world_size": "how many ranks the job had; `null` if no capture records it",
    "missing": "the ranks without a capture",
    "notes": "sentences on missing ranks, partial recordings, and differences of the ranks",
}


def as_text(ranks: Ranks, **options: Any) -> str:
    """Return the comparison of ranks as plain text; `options` are those of `parts`."""
    return plain(parts(ranks, **options))


def parts(
    ranks: Ranks, *, rows: int = 15, sort: str | None = None, columns: Sequence[str] | None = None
) -> list[Part]:
    """Return a comparison of ranks: tables of ranks, collectives and ranges, and sentences.

    Args:
        ranks: the window.
        rows: the maximum number of rows in a table. Of more ranks, those with the longest `own_ns`
            (the step without waiting in communication) are shown.
        sort: the column by which ranges are sorted. None shows the ranges with the most CPU time,
            in the order of the tree.
        columns: the columns of the table of ranges; None means the main columns. ["all"] shows all
            columns of all tables.

    Raises:
        ConfigError: the table of ranges has no such column.
    """
    of = f" of {ranks.world_size}" if ranks.world_size else ""
    every = columns if is_every_column(columns) else None
    by = "own_ns" if len(ranks.ranks) > rows else None
    links = _slow_links(ranks.collectives)
    collectives = view_part("collectives", ranks.collectives, rows=rows, columns=every)
    return [
        [f"{ranks.name}: {len(ranks.summaries)}{of} ranks", *ranks.notes],
        view_part("ranks", ranks.ranks, rows=rows, sort=by, columns=every),
        [*map(_straggler, ranks.stragglers.head(rows))] or ["No rank is a straggler."],
        _clocks(ranks.clocks),
        *([links] if links else []),
        *_titled(collectives, "Collectives over the ranks, by process group and kind"),
        _ranges(ranks.ranges, rows, sort, columns),
    ]


def _titled(part: str | Section, title: str) -> list[Section]:
    return [] if isinstance(part, str) else [replace(part, title=title)]


def as_json(ranks: Ranks) -> str:
    """Return the comparison as JSON: each table is a list of rows, with times in nanoseconds."""
    tables: dict[str, list[Any]] = {name: getattr(ranks, name).to_dicts() for name in SCHEMAS}
    about = {name: getattr(ranks, name) for name in ("name", "world_size", "missing", "notes")}
    return json_text(about | tables)


def as_csv(ranks: Ranks, name: str) -> str:
    """Return one table of the comparison as CSV; see `Table.to_csv`.

    Raises:
        ConfigError: there is no such table.
    """
    if name not in SCHEMAS:
        raise ConfigError(f"There is no table {name!r} of ranks{did_you_mean(name, SCHEMAS)}")
    table: Table = getattr(ranks, name)
    return table.to_csv()


def _straggler(row: Any) -> str:
    where = (
        f"; the largest difference is in the range {row.range} (+{duration(row.range_excess_ns)})"
        if row.range
        else ""
    )
    if (row.range_excess_ns or 0) < _LEAST_EXPLAINED * (row.own_ns - row.median_own_ns):
        where = "; most of the difference is in no range"
    if row.idle_ns is not None and row.others_idle_ns is not None:
        where += (
            f"; its device is idle for {duration(row.idle_ns)} per step, other devices for "
            f"{duration(row.others_idle_ns)}"
        )
    excess = "" if row.excess is None else f" (+{percent(row.excess)})"
    return (
        f"Rank {row.rank}{f' on {row.host}' if row.host else ''} is a straggler: its own work "
        f"takes {duration(row.own_ns)} per step, and {duration(row.median_own_ns)} on the median "
        f"rank{excess}{where}. The rank waits {duration(row.exposed_communication_ns)} "
        f"in communication, other ranks wait {duration(row.others_exposed_communication_ns)}."
    )


def _clocks(table: Table) -> str:
    known = table.where("offset_ns is not null")
    if len(known) < 2:
        return "The ranks' clocks cannot be compared: the ranks have no collective in common."
    apart = duration(max(abs(ns) for ns in known.column("offset_ns")))
    unsure = [ns for ns in known.column("uncertainty_ns")[1:] if ns is not None]
    sure = f"known to ±{duration(max(unsure))}" if unsure else "measured at only one collective"
    missing = len(table) - len(known)
    others = f"; ranks without a common collective: {missing}" if missing else ""
    most = max(table, key=lambda row: abs(row.drift_ppm or 0))
    if ppm := most.drift_ppm:
        gained = f"{'gains' if ppm > 0 else 'loses'} {duration(abs(ppm) * 1000)}"
        others += f"; rank {most.rank}'s clock {gained} a second"
    return f"Clocks: at most {apart} apart from rank {table[0].rank}'s clock, {sure}{others}."


def _slow_links(table: Table) -> list[str]:
    found = slow_groups(table)
    lines = [
        f"The links of ranks {row.ranks or '?'} are slow: {row.kind} in process group "
        f"{row.process_group or '?'} reaches {rate(row.bus_bytes_per_second)} bus bandwidth, the "
        f"median of such groups is {rate(row.usual_bus_bytes_per_second)}."
        for row in found[:_MOST_SLOW_LINKS]
    ]
    more = len(found) - len(lines)
    others = [f"The links of {counted(more, 'more process group')} are slow."] if more else []
    return lines + others


def _ranges(
    table: Table, rows: int, sort: str | None, columns: Sequence[str] | None
) -> str | Section:
    count, shown = len(table), min(rows, len(table))
    chosen = columns or known_columns(table, _OF_RANGES)
    if not is_every_column(columns):
        chosen = ["path", *(name for name in chosen if name != "path")]
    if sort is None and count > rows:
        most = sorted(range(count), key=lambda k: -(table[k].cpu_median_ns or 0))[:rows]
        table = Table(table.frame[sorted(most)])
    part = view_part("ranges", table, rows=rows, sort=sort, columns=chosen)
    if isinstance(part, str):
        return part
    note = f" (the {shown} of {count} with the most {sort or 'CPU time'})" if shown < count else ""
    return replace(part, title=f"Ranges per step over the ranks{note}", chosen=columns is not None)
