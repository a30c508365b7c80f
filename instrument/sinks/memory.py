"""Memory over time: as data and as a page to look at."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, ClassVar, Literal

from loguru import logger
from pydantic import Field

from instrument import files
from instrument.analysis.memory_categories import UNCLASSIFIED, Categories
from instrument.analysis.memory_categories import table as categories_table
from instrument.analysis.memory_timeline import BEFORE, OTHERS, UNKNOWN, Curve, MemoryView, Plot
from instrument.analysis.table import Table, cell_text, duration
from instrument.capture import Capture
from instrument.errors import CaptureError
from instrument.printable import printable_lines
from instrument.sinks import Sink

Form = Literal["json", "raw", "html"]
By = Literal["operator", "range", "module", None]
Scale = Callable[[int], float]

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 960, 300, 70, 18, 20
# Okabe and Ito's colours, which those who see few colours can tell apart; grey is for what is not told apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6bb1")
_GREY = {BEFORE: "#9aa0a6", OTHERS: "#c9cdd2", UNKNOWN: "#7a8fa6", UNCLASSIFIED: "#7a8fa6"}


class Memory(Sink):
    """Writes what lived in memory over time, the three forms that torch's `export_memory_timeline` had.

    - `memory.html`: a page for each reader: the curve of each device, told apart by what made it, what lived at the
      peak, what each step left behind, the commonest sizes. One file, no script, nothing from the network.
      With `profiler.memory_categories`, also by what it was for.
    - `memory.json`: the same as data.
    - `memory.raw.json.gz`: every allocation and free: `columns` names what each of `events` holds.

    Times in the data are nanoseconds on the trace's own clock. With shapes, ranges or stacks recorded it tells more,
    but memory events are enough. Lost: what torch's form tells of parameters, gradients and activations, which
    `profiler.memory_categories` has torch write.

    Cost: about 10 µs a memory event, most of it the raw form.
    """

    sink_name: ClassVar[str] = "memory"

    forms: list[Form] = Field(["json", "raw", "html"], min_length=1)
    """Which of the files are written."""

    by: By = None
    """What tells memory apart in the curve; None: what of these tells the most of the peak apart."""

    rows: int = Field(15, ge=1)
    """How many rows the page's tables have at most."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The memory events themselves."""
        return ("profile_memory",)

    def write(self, capture: Capture, folder: Path) -> None:
        """Write the files.

        Raises:
            CaptureError: the trace holds no memory events, or no modules and `by` asks for them.
            TraceError: the trace cannot be read.
        """
        memory = capture.memory
        curves = [memory.curve(self.by, device=device) for device in _devices(memory)]
        if "json" in self.forms:
            files.write(folder / "memory.json", json.dumps(_data(memory, curves)))
        if "raw" in self.forms:
            raw = json.dumps({"columns": memory.events.columns, "events": [*memory.events]})
            files.write(folder / "memory.raw.json.gz", gzip.compress(raw.encode(), 3))
        if "html" in self.forms:
            files.write(folder / "memory.html", printable_lines(_page(capture, curves, self.rows)))


def _devices(memory: MemoryView) -> Iterable[str]:
    """The devices; the view's own sentence where there are none."""
    memory.timeline()
    return memory.timelines


def _data(memory: MemoryView, curves: Sequence[Curve]) -> dict[str, Any]:
    """What `memory.json` holds: the curves, and the view's tables as lists of rows."""
    tables = {"devices": memory.devices, "steps": memory.steps, "sizes": memory.sizes}
    live = {curve.device: _rows(memory.live(curve.by, device=curve.device)) for curve in curves}
    return {
        "format": 1,
        **{name: _rows(table) for name, table in tables.items()},
        "live_at_peak": live,
        "curves": [
            {
                "device": curve.device,
                "by": curve.by,
                "times_ns": curve.time_ns,
                "reserved_bytes": curve.reserved_bytes,
                "live_bytes": curve.series,
            }
            for curve in curves
        ],
    }


def _rows(table: Table) -> list[dict[str, Any]]:
    return [row._asdict() for row in table]


def _page(capture: Capture, curves: Sequence[Curve], rows: int) -> str:
    try:
        categories: Sequence[Categories] = capture.categories
    except CaptureError as error:
        logger.warning("{} The page is without memory by category.", error)
        categories = []
    sections = "\n".join(_section(capture, curve, rows, categories) for curve in curves)
    title = escape(f"Memory of {capture.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n{sections}\n</body></html>\n"
    )


def _section(capture: Capture, curve: Curve, rows: int, categories: Sequence[Categories]) -> str:
    """All that the page tells of one device."""
    memory, device = capture.memory, curve.device
    facts = memory.devices.where(device=device)[0]
    start = curve.time_ns[0]
    parts = [f"<section><h2>{escape(device)}</h2>", _headline(facts, start)]
    parts += [_chart(capture, curve), _legend(curve, curve.by)]
    for each in categories:
        if each.device == device:
            plot, title = each.plot(), "By torch's categories, with what of before the window it uses"
            parts += [_chart(capture, plot), _legend(plot, "category")]
            parts.append(_table(title, _of(categories_table([each]), device), rows, start))
    for by in dict.fromkeys((curve.by, *memory.kinds)):
        live = memory.live(by, device=device)
        if live[0].name is not None:
            parts.append(_table(f"What lived at the peak, by {by}", live, rows, start))
    parts.append(_table("What each step left behind", _of(memory.steps, device), rows, start))
    parts.append(_table("Allocations by size", _of(memory.sizes, device), rows, start))
    return "\n".join(parts) + "</section>"


def _headline(facts: Any, start: int) -> str:
    told = facts.peak_bytes if facts.peak_bytes is not None else facts.peak_net_bytes
    what = "in use at the peak" if facts.peak_bytes is not None else "more than at the start, at the peak"
    tiles = [(cell_text("bytes", told), f"{what}, {duration(facts.peak_ns - start)} in")]
    if facts.reserved_bytes is not None:
        tiles.append((cell_text("bytes", facts.reserved_bytes), "the most that the allocator held"))
    tiles.append((cell_text("bytes", facts.net_bytes), "left behind by the window"))
    tiles.append((f"{facts.allocations:,}", f"allocations, of {cell_text('bytes', facts.allocated_bytes)} in all"))
    cells = "".join(f"<div><b>{escape(value)}</b>{escape(label)}</div>" for value, label in tiles)
    return f'<div class="tiles">{cells}</div>'


def _chart(capture: Capture, curve: Plot) -> str:
    """The curve as SVG: areas that stand on each other, the reserved bytes as a line, the steps as uprights."""
    first, last = curve.time_ns[0], curve.time_ns[-1]
    tops = [sum(values) for values in zip(*curve.series.values())] or [0]
    highest: int = max([*tops, *(curve.reserved_bytes or []), 1])

    def x(time_ns: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * (time_ns - first) / max(last - first, 1), 1)

    def y(size: float) -> float:
        return round(_TOP + _HEIGHT * (1 - size / highest), 1)

    marks = [
        _upright(x(step.start_ns), f"step {step.number}") for step in capture.steps if first < step.start_ns < last
    ]
    lines = [_level(y(highest * part / 4), cell_text("bytes", round(highest * part / 4))) for part in range(5)]
    areas, below = [], [0] * len(curve.time_ns)
    for name, values in curve.series.items():
        above = [low + value for low, value in zip(below, values)]
        edge = _stairs(curve.time_ns, above, x, y) + _stairs(curve.time_ns, below, x, y)[::-1]
        areas.append(
            f'<polygon points="{_points(edge)}" fill="{_colour(curve, name)}"><title>{escape(name)}</title></polygon>'
        )
        below = above
    reserved = ""
    if curve.reserved_bytes:
        edge = _stairs(curve.time_ns, curve.reserved_bytes, x, y)
        reserved = f'<polyline points="{_points(edge)}"><title>held by the allocator</title></polyline>'
    end = f'<text x="{_WIDTH}" y="{_TOP + _HEIGHT + 14}" text-anchor="end">{escape(duration(last - first))}</text>'
    zero = f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 14}">0</text>'
    box = f'viewBox="0 0 {_WIDTH} {_TOP + _HEIGHT + _BOTTOM}" role="img" aria-label="memory over time"'
    return f"<svg {box}>{''.join([*lines, *areas, *marks, reserved, zero, end])}</svg>"


def _stairs(times: Sequence[int], sizes: Sequence[int], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """A level holds until the next event."""
    corners: list[tuple[float, float]] = []
    for at, (time_ns, size) in enumerate(zip(times, sizes)):
        if at:
            corners.append((x(time_ns), corners[-1][1]))
        corners.append((x(time_ns), y(size)))
    return corners


def _points(corners: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in corners)


def _level(y: float, label: str) -> str:
    text = f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{escape(label)}</text>'
    return f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}"/>{text}'


def _upright(x: float, label: str) -> str:
    line = f'<line class="step" x1="{x}" x2="{x}" y1="4" y2="{_TOP + _HEIGHT}"/>'
    return f'{line}<text x="{x + 3}" y="12">{escape(label)}</text>'


def _colour(curve: Plot, name: str) -> str:
    told = [each for each in curve.series if each not in _GREY]
    return _GREY.get(name) or _COLOURS[told.index(name) % len(_COLOURS)]


def _legend(curve: Plot, by: str) -> str:
    names = [f'<span><i style="background:{_colour(curve, name)}"></i>{escape(name)}</span>' for name in curve.series]
    if curve.reserved_bytes:
        names.append('<span><i class="reserved"></i>held by the allocator</span>')
    if UNKNOWN in curve.series:
        names.append("The trace holds no addresses, so it cannot be told what lived.")
    return f'<p class="legend">By {by}: {"".join(names[::-1])}</p>'


def _of(table: Table, device: str) -> Table:
    found = table.where(device=device)
    return found.select([name for name in found.columns if name != "device"])


def _table(title: str, table: Table, rows: int, start: int) -> str:
    """A table of the page; times are told from the start of the curve."""
    if not len(table):
        return ""
    known = [name for name in table.columns if any(value is not None for value in table.column(name))]
    head = "".join(f"<th>{escape(_TITLES.get(name, name.removesuffix('_bytes')))}</th>" for name in known)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(name, getattr(row, name), start))}</td>' for name in known)}</tr>\n"
        for row in table.head(rows)
    )
    more = f"<caption>{escape(title)}{f', {rows} of {len(table)}' if len(table) > rows else ''}</caption>"
    return f"<table>{more}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, value: Any, start: int) -> str:
    if value is None:
        return "–"
    return duration(value - start) if name == "since_ns" else cell_text(name, value, 10_000)


_TITLES = {
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
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #656d76; --line: #d8dee4; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px;
  margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; }
h2 { font-size: 1.2em; margin: 2em 0 .5em; border-bottom: 1px solid var(--line); }
.tiles { display: flex; flex-wrap: wrap; gap: 2em; margin: 1em 0; }
.tiles div { color: var(--soft); max-width: 16em; }
.tiles b { display: block; font-size: 1.5em; color: var(--ink); }
svg { width: 100%; }
svg text { font-size: 11px; fill: var(--soft); }
svg line { stroke: var(--line); }
svg line.step { stroke: var(--ink); stroke-dasharray: 2 4; opacity: .6; }
svg polygon { fill-opacity: .85; }
svg polyline { fill: none; stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 6 3; }
.legend { color: var(--soft); font-size: .9em; }
.legend span { margin-right: 1.2em; overflow-wrap: anywhere; display: inline-block; }
.legend i { display: inline-block; width: 1em; height: .8em; margin-right: .4em; }
.legend i.reserved { height: 0; border-top: 2px dashed var(--ink); vertical-align: middle; }
table { border-collapse: collapse; margin: 1.5em 0; width: 100%; }
caption { text-align: left; font-weight: 600; padding: .3em 0; }
th, td { text-align: right; padding: .2em .8em; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
td:first-child, th:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; padding-left: 0; }
"""
