"""Memory over time, as data and as a page."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from loguru import logger
from pydantic import Field

from instrument import files
from instrument.analysis.memory_categories import Categories
from instrument.analysis.memory_timeline import Curve, MemoryView
from instrument.analysis.table import Table
from instrument.capture import Capture
from instrument.errors import CaptureError
from instrument.report.memory import page
from instrument.sinks import Sink

Form = Literal["json", "raw", "html"]
By = Literal["operator", "range", "module", None]


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
            files.write(
                folder / "memory.html", page(capture, curves, _categories(capture), self.rows)
            )


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


def _categories(capture: Capture) -> list[Categories]:
    """What torch classified; nothing where its files cannot be read."""
    try:
        return capture.categories
    except CaptureError as error:
        logger.warning("{} The page is without memory by category.", error)
        return []
