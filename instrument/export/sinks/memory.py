"""A sink that writes the memory in use over time, as data and as an HTML page."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from instrument.base import files
from instrument.export.sinks.sink import Sink

if TYPE_CHECKING:
    from instrument.read.capture import Capture
    from instrument.read.views.memory_timeline import Curve

Form = Literal["json", "raw", "html"]
By = Literal["operator", "range", "module", None]


class Memory(Sink):
    """Writes the memory in use over time, in the three forms of torch's `export_memory_timeline`.

    - `memory.html`: a page about each device. The page shows the memory over time (split by `by`),
      the memory in use at the peak, and the change of memory in each step. With
      `profiler.memory_categories`, the page also shows memory by category. The section "Memory" of
      `report.html` has the same content. The page loads no other files.
    - `memory.json`: the data of the page, except memory by category. If memory events are missing,
      the key `incomplete` holds the rows of `capture.coverage` that say what is missing.
    - `memory.raw.json.gz`: every allocation and free, in the list `events`; `columns` names the
      fields of an event.

    Times in the data are nanoseconds on the trace's own clock. Only memory events are needed;
    recorded shapes, ranges and stacks add detail. A split into parameters, gradients and
    activations needs `profiler.memory_categories`, because torch does not record these categories.

    Cost: about 10 µs per memory event, most of it for the raw form.
    """

    sink_name: ClassVar[str] = "memory"

    forms: list[Form] = Field(["json", "raw", "html"], min_length=1)
    """Which files to write; `raw` holds every allocation and free."""

    by: By = None
    """What splits the memory into series; None: what explains most of the peak. `module` needs
    `with_stack`."""

    rows: int = Field(15, ge=1)
    """The maximum number of rows in each table of the page."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The option that records memory events."""
        return ("profile_memory",)

    def write(self, capture: Capture, folder: Path) -> None:
        """Write a file for each form in `forms`.

        Raises:
            CaptureError: the trace holds no memory events, or no modules although `by` is `module`.
        """
        from instrument.read.show.page.memory import MEMORY_VIEWS, memory
        from instrument.read.show.page.page import page
        from instrument.read.views.coverage import losses
        from instrument.read.views.views import rows_of

        view = capture.memory
        view.timeline()  # raises if the capture has no memory events
        curves = [view.curve(self.by, device=device) for device in view.timelines]
        if "json" in self.forms:
            missing = losses(capture, rows_of(MEMORY_VIEWS))
            data = _data(capture, curves) | ({"incomplete": missing} if missing else {})
            files.write(folder / "memory.json", json.dumps(data))
        if "raw" in self.forms:
            events = capture.memory_events
            raw = json.dumps({"columns": events.columns, "events": [*events]})
            files.write(folder / "memory.raw.json.gz", gzip.compress(raw.encode(), 3, mtime=0))
        if "html" in self.forms:
            payload = {
                "title": f"Memory of {capture.name}",
                "begin_ns": capture.memory.links.events.begin_ns,
                "sections": {"memory": memory(capture, curves, self.rows)},
            }
            files.write(folder / "memory.html", page(payload).html)


def _data(capture: Capture, curves: Sequence[Curve]) -> dict[str, Any]:
    tables = {name: getattr(capture, f"memory_{name}") for name in ("devices", "steps")}
    live = {
        curve.device: capture.memory_live(curve.by, device=curve.device).to_dicts()
        for curve in curves
    }
    return {
        "format": 1,
        **{name: table.to_dicts() for name, table in tables.items()},
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
