"""Memory by torch's categories (parameters, gradients, activations, …) over a window.

torch writes a JSON file `[times, sizes]` for each device. `times` are Unix times in µs. For each of
them, `sizes` holds a 0 and the bytes of every category (`export_memory_timeline` in
torch/profiler/_memory_profiler.py). Older memory has the time of the first event.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from instrument.base import files
from instrument.base.errors import CaptureError
from instrument.read.facts.schema import Schema, schema
from instrument.read.trace.capture_json import BAD_JSON
from instrument.read.trace.events import Ints
from instrument.read.views.memory_timeline import Plot, extremes
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

UNCLASSIFIED = "unknown"
# In the order of torch's columns.
CATEGORIES = (
    "parameter", "optimizer state", "input", "temporary", "activation", "gradient",
    "autograd detail", UNCLASSIFIED,
)  # fmt: skip
# `_FILE` does not match the files that are raw.
_FILE = re.compile(r"memory_categories_([a-z]+(?:-\d+)?)\.json")

_Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
_Content = tuple[list[_Number], list[Annotated[list[_Number], Meta(min_length=9, max_length=9)]]]


@dataclass(frozen=True, slots=True)
class Categories:
    """The bytes of each category on one device over time.

    Attributes:
        device: the device, as in torch.
        time_ns: the times on the trace's own clock. If nothing changed, there is one time, 0.
        live_bytes: for each category, its memory at each time.
        start_bytes: for each category, the memory from before the window that the window uses.
    """

    device: str
    time_ns: Ints
    live_bytes: Mapping[str, Ints]
    start_bytes: Mapping[str, int]

    @property
    def level_bytes(self) -> Ints:
        """The bytes of all categories together."""
        return sum(self.live_bytes.values(), np.zeros(len(self.time_ns), np.int64))

    def plot(self) -> Plot:
        """Return a plot of at most 2,000 points in time; see `MemoryView.curve`."""
        kept = extremes(self.level_bytes, self.time_ns, 1000)
        series = {
            name: sizes[kept].tolist() for name, sizes in self.live_bytes.items() if sizes.any()
        }
        return Plot(self.device, self.time_ns[kept].tolist(), None, series)


def read(folder: Path, base_ns: int) -> list[Categories]:
    """Read the categories of each device of a capture, the CPU last; none if not recorded.

    `base_ns` is the Unix time in ns at which the trace's clock is 0.

    Raises:
        CaptureError: a file has the wrong content, or is larger than 64 MB.
    """
    paths = sorted(folder.glob(files.MEMORY_CATEGORIES_FILES))
    named = [(path, _FILE.fullmatch(path.name)) for path in paths]
    found = [_read(path, name[1].replace("-", ":"), base_ns) for path, name in named if name]
    return sorted(found, key=lambda each: each.device == "cpu")


def _read(path: Path, device: str, base_ns: int) -> Categories:
    try:
        times, sizes = msgspec.json.decode(files.read_bytes(path), type=_Content)
    except OSError as error:
        raise CaptureError(f"The file {path} cannot be read: {error.strerror}.") from None
    except BAD_JSON as error:
        raise CaptureError(f"The file {path} cannot be understood ({error}): remove it.") from None
    if len(times) != len(sizes) or not times:
        raise CaptureError(
            f"The file {path} holds {len(times)} timestamps and {len(sizes)} lists of sizes. Both "
            "numbers must be equal, and at least 1: remove the file."
        )
    held_before = times[0] < 0 or times[:1] == times[1:2]
    time_ns = np.zeros(1, np.int64) if times == [-1] else np.array(times, np.int64) * 1000 - base_ns
    columns = np.array(sizes, np.int64).T[1:]
    start = [int(column[0]) if held_before else 0 for column in columns]
    return Categories(device, time_ns, dict(zip(CATEGORIES, columns)), dict(zip(CATEGORIES, start)))


MEMORY_CATEGORIES: Schema = schema(
    device="the device, as torch writes it",
    category="torch's category: parameter, activation, gradient, …; unknown for memory that torch "
    "cannot classify",
    at_peak_bytes="the category's memory when all categories together hold the most memory",
    max_bytes="the most memory that the category holds at any time",
    start_bytes="the category's memory when the window begins",
    end_bytes="the category's memory when the window ends",
)


def memory_categories(capture: Views) -> Table:
    """Return a row for each device and category that held memory; see `at_peak`."""
    return at_peak(capture.categories)


def at_peak(categories: Sequence[Categories]) -> Table:
    """Return a row for each device and category that held memory; see `MEMORY_CATEGORIES`.

    For each device, the largest category at the peak of all categories together comes first.
    docs/show.md names limits of torch's numbers.
    """
    rows = []
    for each in categories:
        peak = int(np.argmax(each.level_bytes))
        held = [(name, sizes) for name, sizes in each.live_bytes.items() if sizes.any()]
        for name, sizes in sorted(held, key=lambda pair: -int(pair[1][peak])):
            at_peak, most, end = int(sizes[peak]), int(sizes.max()), int(sizes[-1])
            rows.append((each.device, name, at_peak, most, each.start_bytes[name], end))
    return Table.of_rows(MEMORY_CATEGORIES, rows)
