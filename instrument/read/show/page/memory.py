"""The section *Memory*: the memory in use over time, at the peak, and in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from instrument.base import files
from instrument.base.errors import CaptureError
from instrument.base.units import duration, size
from instrument.read.facts.groupby import differences
from instrument.read.facts.schema import Schema
from instrument.read.show.page.parts import (
    Part,
    choice,
    columns_of,
    fact,
    facts,
    section,
    table,
    text,
)
from instrument.read.views.coverage import line
from instrument.read.views.memory_categories import (
    MEMORY_CATEGORIES,
    UNCLASSIFIED,
    Categories,
    at_peak,
)
from instrument.read.views.memory_timeline import (
    BEFORE,
    MEMORY_LIVE,
    MEMORY_STEPS,
    OTHERS,
    UNKNOWN,
    Curve,
    Plot,
)
from instrument.read.views.table import Table
from instrument.read.views.views import Views, rows_of

#: The views whose numbers the section shows.
MEMORY_VIEWS = ("memory_devices", "memory_live()", "memory_steps")
_SNAPSHOT = "memory_snapshot.pickle"
_OPEN_SNAPSHOT = (
    "The allocator's snapshot is in the folder of the capture. Open it at pytorch.org/memory_viz:"
)
_MOST_ROWS = 200
# The page draws these series in grey.
_GREYS = (BEFORE, OTHERS, UNCLASSIFIED)
_NO_ADDRESSES = (
    "The trace has no addresses of memory, so it shows how much memory was in use, but not what "
    "used it: record with profiler.profile_memory=true and a newer version of torch."
)
_NO_NAMES = (
    "The trace does not name what used this memory: mark code with @profiled, give the session the "
    "model, or record with profiler.with_stack=true."
)


def memory(
    capture: Views, curves: Sequence[Curve] | None = None, rows: int = _MOST_ROWS
) -> dict[str, Any] | None:
    """Return the memory use of each device; None if the trace has no memory events.

    A chart is kept if at least one series names what used the memory. If a device has no such
    chart, its first chart is kept. `parts.py` describes the keys of a chart.

    Args:
        capture: the capture.
        curves: for each device, the memory over time that its first chart shows; None means the
            result of `capture.memory.curve`.
        rows: the maximum number of rows in a table.

    Cost: about 3 µs per memory event.
    """
    timelines = capture.memory.timelines
    if not timelines:
        return None
    if curves is None:
        curves = [capture.memory.curve(device=device) for device in timelines]
    categories, problem = _categories(capture)
    parts = [part for curve in curves for part in _device(capture, curve, categories, rows)]
    if capture.folder and files.is_regular(capture.folder / _SNAPSHOT):
        parts.append(text(_OPEN_SNAPSHOT, href=_SNAPSHOT))
    missing = line(capture, rows_of(MEMORY_VIEWS))
    if capture.memory.links is not capture.links:
        parts.insert(0, text("In the steps after the window, its detail window.", "soft"))
    return section("Memory", *parts, text(problem, "soft"), text(missing, "soft"))


def _categories(capture: Views) -> tuple[list[Categories], str]:
    """Return the memory by torch's categories, and an empty text.

    If the categories are not known, the list is empty and the text says why.
    """
    try:
        return capture.categories, ""
    except CaptureError as error:
        return [], f"{error} The page does not show memory by category."


def _device(
    capture: Views, curve: Curve, categories: Sequence[Categories], rows: int
) -> Iterator[Part | None]:
    view, device = capture.memory, curve.device
    links = view.links
    begin_ns, at_ns = links.events.begin_ns, links.events.start_ns[links.steps].tolist()
    steps = [[number, at - begin_ns] for number, at in zip(links.step_numbers, at_ns)]

    def listed(caption: str, cells: Table, columns: Schema, shown: int = 15) -> Part:
        names = [name for name in cells.columns if name != "device"]
        return table(caption, columns_of(cells.head(rows).select(names), columns), shown=shown)

    charts: list[tuple[str, Part, Part | None]] = []

    def add(by: str, plot: Plot, live: Table, columns: Schema) -> None:
        is_known = columns is not MEMORY_LIVE or live[0].name is not None
        peak = listed(f"In use at the peak, by {by}", live, columns, 10) if is_known else None
        chart = {"kind": "memory", "device": device, "steps": steps, **_chart(begin_ns, plot)}
        charts.append((by, chart, peak))

    for each in (curve, *(view.curve(by, device=device) for by in view.kinds if by != curve.by)):
        add(each.by, each, capture.memory_live(each.by, device=device), MEMORY_LIVE)
    for kind in categories:
        if kind.device == device:
            add("category", kind.plot(), at_peak([kind]), MEMORY_CATEGORIES)
    named = [each for each in charts if any(_is_name(each[0], one) for one in each[1]["series"])]
    yield text(device, "h3")
    yield _facts(capture.memory_devices.where(device=device).since_begin()[0])
    shown = {f"by {by}": [chart, text(f"In use at the peak, by {by}", "h4") if peak else None, peak]
             for by, chart, peak in named}  # fmt: skip
    if len(shown) > 1:
        yield choice(f"Group the memory of {device} by", shown)
    elif shown:
        yield from next(iter(shown.values()))
    else:
        yield charts[0][1]
        yield text(_NO_NAMES if charts[0][2] else _NO_ADDRESSES)
    yield text("Memory of each step", "h4")
    yield listed(f"Steps on {device}", capture.memory_steps.where(device=device), MEMORY_STEPS)


def _facts(row: Any) -> Part | None:
    when = f"after {duration(row.peak_ns)}"
    if row.peak_bytes is None:
        boxes = [fact("Growth from the start to the peak", size(row.peak_net_bytes), when)]
    else:
        boxes = [fact("In use at the peak", size(row.peak_bytes), when)]
    if row.reserved_bytes is not None:
        reserved = size(row.reserved_bytes)
        boxes.append(fact("Reserved by the allocator", reserved, "largest value"))
    growth = "Growth over the window"
    boxes.append(fact(growth, size(row.net_bytes), "from its start to its end"))
    total = f"{size(row.allocated_bytes)} in total"
    return facts([*boxes, fact("Allocations", f"{row.allocations:,}", total)])


def _is_name(by: str, series: dict[str, Any]) -> bool:
    """Whether the name of a series says what used the memory."""
    return not series["is_grey"] and series["name"] not in (UNKNOWN, f"[no {by}]")


def _chart(begin_ns: int, plot: Plot) -> dict[str, Any]:
    return {
        "time": differences([time - begin_ns for time in plot.time_ns]),
        "reserved": None if plot.reserved_bytes is None else differences(plot.reserved_bytes),
        "series": [
            {"name": name, "is_grey": name in _GREYS, "bytes": differences(values)}
            for name, values in plot.series.items()
        ],
    }
