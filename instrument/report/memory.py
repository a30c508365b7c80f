"""The page `memory.html`, which shows the memory in use over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from instrument.analysis.coverage import line
from instrument.analysis.memory_categories import UNCLASSIFIED, Categories
from instrument.analysis.memory_categories import table as categories_table
from instrument.analysis.memory_plot import Curve, Plot
from instrument.analysis.memory_timeline import BEFORE, OTHERS, UNKNOWN
from instrument.analysis.table import Table, cell_text, known_columns
from instrument.analysis.views import Views, rows_of
from instrument.templates import render
from instrument.units import duration, size

# The views whose numbers are on the page.
MEMORY_VIEWS = ("memory.devices", "memory.live()", "memory.steps", "memory.sizes")
_WIDTH, _HEIGHT, _LEFT, _TOP = 960, 300, 70, 18  # of a chart, in pixels
_COLOURS = 8  # the number of colours in assets/memory.css
_GREYS = {BEFORE: "before", OTHERS: "others", UNKNOWN: "unknown", UNCLASSIFIED: "unknown"}
_HEADINGS = {
    "since_ns": "since",
    "number": "step",
    "net_bytes": "left behind",
    "start_bytes": "at its start",
    "peak_bytes": "at its peak",
    "size_bytes": "size",
    "kept": "not freed",
    "at_peak_bytes": "at the peak",
    "max_bytes": "at most",
    "end_bytes": "at the end",
}


class _Area(NamedTuple):
    """One series of a chart; its CSS class is "series-" followed by the value of `colour`."""

    name: str
    points: str
    colour: str


class _Chart(NamedTuple):
    """A plot as the page draws it, with positions in pixels.

    `areas` are the stacked series, and `reserved` holds the points of the line for reserved memory.
    `levels` holds the horizontal lines and `steps` the vertical lines, each line as a pair of its
    position and its label.
    """

    by: str
    areas: list[_Area]
    reserved: str
    levels: list[tuple[float, str]]
    steps: list[tuple[float, str]]
    length: str
    without_addresses: bool


class _Device(NamedTuple):
    """The section of the page about one device: numbers, charts and tables, each with a label."""

    name: str
    tiles: list[tuple[str, str]]
    charts: list[_Chart]
    tables: list[tuple[str, Table]]


def page(
    capture: Views, curves: Sequence[Curve], categories: Sequence[Categories], rows: int
) -> str:
    """Return the HTML of the page: charts and tables for each device.

    The tables show the memory in use at the peak, the memory that each training step left behind,
    and the allocations by size. The page has no script and loads nothing. A table has at most
    `rows` rows.

    Raises:
        CaptureError, TraceError: as for `capture.memory`.
    """
    return render(
        "report/templates/memory.html",
        title=f"Memory of {capture.name}",
        devices=[_device(capture, curve, categories) for curve in curves],
        incomplete=line(capture, rows_of(MEMORY_VIEWS)),
        rows=rows,
        place={"left": _LEFT, "top": _TOP, "right": _WIDTH, "bottom": _TOP + _HEIGHT},
        known_columns=known_columns,
        heading=lambda name: _HEADINGS.get(name, name.removesuffix("_bytes")),
        cell_text=cell_text,
    )


def _device(capture: Views, curve: Curve, categories: Sequence[Categories]) -> _Device:
    memory, device = capture.memory, curve.device
    charts, tables = [_chart(curve, curve.by, capture.steps)], []
    for each in categories:
        if each.device == device:
            charts.append(_chart(each.plot(), "category", capture.steps))
            tables.append(
                (
                    "By torch's categories, including earlier memory that the window uses",
                    categories_table([each]),
                )
            )
    for by in dict.fromkeys((curve.by, *memory.kinds)):
        live = memory.live(by, device=device)
        if live[0].name is not None:
            tables.append((f"In use at the peak, by {by}", live))
    tables.append(("What each step left behind", memory.steps.where(device=device)))
    tables.append(("Allocations by size", memory.sizes.where(device=device)))
    start = curve.time_ns[0]
    tiles = _tiles(memory.devices.where(device=device)[0], start)
    return _Device(
        device, tiles, charts, [(title, _listed(table, start)) for title, table in tables]
    )


def _chart(plot: Plot, by: str, steps: Table) -> _Chart:
    first, last = plot.time_ns[0], plot.time_ns[-1]
    tops = [sum(values) for values in zip(*plot.series.values())]
    most: int = max([*tops, *(plot.reserved_bytes or []), 1])

    def x(time_ns: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * (time_ns - first) / max(last - first, 1), 1)

    def y(level: float) -> float:
        return round(_TOP + _HEIGHT * (1 - level / most), 1)

    def stairs(levels: Sequence[int]) -> list[str]:
        """The points that draw `levels` as stairs: a level stays the same until the next time."""
        xs, ys = [x(time_ns) for time_ns in plot.time_ns], [y(level) for level in levels]
        before = [f"{at},{level}" for at, level in zip(xs[1:], ys)]
        points = [f"{at},{level}" for at, level in zip(xs, ys)]
        return [points[0], *chain.from_iterable(zip(before, points[1:]))]

    named = [name for name in plot.series if name not in _GREYS]
    colours = {name: f"{number % _COLOURS}" for number, name in enumerate(named)} | _GREYS
    areas, below = [], [0] * len(plot.time_ns)
    for name, values in plot.series.items():
        above = [low + value for low, value in zip(below, values)]
        areas.append(_Area(name, " ".join(stairs(above) + stairs(below)[::-1]), colours[name]))
        below = above
    quarters = [most * part / 4 for part in range(5)]
    return _Chart(
        by=by,
        areas=areas,
        reserved=" ".join(stairs(plot.reserved_bytes)) if plot.reserved_bytes else "",
        levels=[(y(level), size(round(level))) for level in quarters],
        steps=[
            (x(step.start_ns), f"step {step.number}")
            for step in steps
            if first < step.start_ns < last
        ],
        length=duration(last - first),
        without_addresses=UNKNOWN in plot.series,
    )


def _tiles(facts: Any, start: int) -> list[tuple[str, str]]:
    """The numbers above the charts, with their labels."""
    if facts.peak_bytes is not None:
        peak, what = facts.peak_bytes, "in use at the peak"
    else:
        peak, what = facts.peak_net_bytes, "more at the peak than at the start"
    tiles = [(size(peak), f"{what}, after {duration(facts.peak_ns - start)}")]
    if facts.reserved_bytes is not None:
        tiles.append((size(facts.reserved_bytes), "the most memory that the allocator held"))
    tiles.append((size(facts.net_bytes), "left behind by the window"))
    tiles.append(
        (
            f"{facts.allocations:,}",
            f"allocations, {size(facts.allocated_bytes)} together",
        )
    )
    return tiles


def _listed(table: Table, start: int) -> Table:
    """The table without the column `device`, and with times since the start of the curve."""
    columns = {name: table.column(name) for name in table.columns if name != "device"}
    return Table(columns, begin_ns=start).since_begin()
