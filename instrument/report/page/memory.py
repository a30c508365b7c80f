"""The section *Memory*: the memory in use over time, at the peak, and in each step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from instrument import files
from instrument.analysis.coverage import line
from instrument.analysis.memory_categories import MEMORY_CATEGORIES, UNCLASSIFIED, Categories
from instrument.analysis.memory_categories import table as categories_table
from instrument.analysis.memory_plot import Curve, Plot
from instrument.analysis.memory_timeline import BEFORE, LIVE, MEMORY_STEPS, OTHERS, SIZES, UNKNOWN
from instrument.analysis.table import Schema, Table
from instrument.analysis.views import Views, rows_of
from instrument.errors import CaptureError
from instrument.links.groupby import differences
from instrument.report.page.tables import as_columns

#: The views whose numbers the section shows.
MEMORY_VIEWS = ("memory.devices", "memory.live()", "memory.steps", "memory.sizes")
_SNAPSHOT = "memory_snapshot.pickle"
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


def section(
    capture: Views, curves: Sequence[Curve] | None = None, rows: int = _MOST_ROWS
) -> dict[str, Any] | None:
    """Return the memory use of each device; None if the trace has no memory events.

    Times are in nanoseconds since the first event of the trace.

    The keys:

    - `devices`: an entry for each device, with the keys `name`, `summary`, `charts`, `missing`,
      `steps` and `sizes`. `summary` is the device's row of `capture.memory.devices`. `steps` and
      `sizes` are tables with the keys of `tables.as_columns`. If no chart names what used the
      memory, `missing` is a sentence on what to record; otherwise it is "".
    - `steps`: the number and the start of each finished step.
    - `snapshot`: the name of the file with the allocator's snapshot, or None.
    - `notes`: sentences on missing data.

    The keys of a chart:

    - `by`: the property that groups the memory into series.
    - `time`, `reserved`: the times, and the reserved bytes; `reserved` is None if it was not
      recorded.
    - `series`: for each series its `name`, its `bytes`, and `is_grey`: whether the page draws the
      series in grey. Grey: memory from before the window, `[others]`, and memory of no category.
    - `live`: the table of the memory in use at the peak, or None.

    A chart is kept if at least one series names what used the memory. If a device has no such
    chart, its first chart is kept.

    The lists `time`, `reserved` and `bytes` hold the difference of each value from the value
    before. The memory is constant between two times.

    Args:
        capture: the capture.
        curves: for each device, the memory over time that its first chart shows; None means the
            result of `capture.memory.curve`.
        rows: the maximum number of rows in a table.

    Cost: about 3 µs per memory event.
    """
    memory = capture.memory
    if not memory.timelines:
        return None
    if curves is None:
        curves = [memory.curve(device=device) for device in memory.timelines]
    categories, problem = _categories(capture)
    notes = [problem, line(capture, rows_of(MEMORY_VIEWS))]
    folder = capture.folder
    begin_ns = capture.events.begin_ns
    return {
        "devices": [_device(capture, curve, categories, rows) for curve in curves],
        "steps": [[step.number, step.start_ns - begin_ns] for step in capture.steps],
        "snapshot": _SNAPSHOT if folder and files.is_regular(folder / _SNAPSHOT) else None,
        "notes": [note for note in notes if note],
    }


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
) -> dict[str, Any]:
    memory, device = capture.memory, curve.device

    def listed(table: Table, columns: Schema) -> dict[str, Any]:
        shown = [name for name in table.columns if name != "device"]
        return as_columns(table.head(rows).select(shown), columns)

    others = [memory.curve(by, device=device) for by in memory.kinds if by != curve.by]
    charts = []
    for each in (curve, *others):
        live = memory.live(each.by, device=device)
        table = None if live[0].name is None else listed(live, LIVE)
        charts.append({"by": each.by, "live": table, **_chart(capture, each)})
    for kind in categories:
        if kind.device == device:
            table = listed(categories_table([kind]), MEMORY_CATEGORIES)
            charts.append({"by": "category", "live": table, **_chart(capture, kind.plot())})
    named = [chart for chart in charts if any(map(partial(_is_name, chart), chart["series"]))]
    missing = _NO_NAMES if charts[0]["live"] else _NO_ADDRESSES
    summary = memory.devices.where(device=device).since_begin()[0]._asdict()
    return {
        "name": device,
        "summary": summary,
        "charts": named or charts[:1],
        "missing": "" if named else missing,
        "steps": listed(memory.steps.where(device=device), MEMORY_STEPS),
        "sizes": listed(memory.sizes.where(device=device), SIZES),
    }


def _is_name(chart: dict[str, Any], series: dict[str, Any]) -> bool:
    """Whether the name of a series says what used the memory."""
    return not series["is_grey"] and series["name"] not in (UNKNOWN, f"[no {chart['by']}]")


def _chart(capture: Views, plot: Plot) -> dict[str, Any]:
    begin_ns = capture.events.begin_ns
    return {
        "time": differences([time - begin_ns for time in plot.time_ns]),
        "reserved": None if plot.reserved_bytes is None else differences(plot.reserved_bytes),
        "series": [
            {"name": name, "is_grey": name in _GREYS, "bytes": differences(values)}
            for name, values in plot.series.items()
        ],
    }
