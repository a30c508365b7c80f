"""What lived in memory by what it was for, as torch classified it when the window ended.

torch writes a file for each device, `[times, sizes]`: Unix times in µs, and for each the bytes of every category behind
a 0 (`export_memory_timeline` in torch/profiler/_memory_profiler.py). What lived before has the first event's time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from instrument import files
from instrument.analysis.memory_timeline import Plot, extremes
from instrument.analysis.table import Schema, Table, names_of, schema
from instrument.errors import CaptureError
from instrument.trace.capture_json import BAD_JSON
from instrument.trace.events import Ints

UNCLASSIFIED = "unknown"
# In the order of torch's columns. The last is what torch cannot tell.
CATEGORIES = (
    "parameter", "optimizer state", "input", "temporary", "activation", "gradient", "autograd detail", UNCLASSIFIED,
)  # fmt: skip
# The files of all devices, and that of one with the sizes over time.
PATTERN = "memory_categories_*"
_FILE = re.compile(r"memory_categories_([a-z]+(?:-\d+)?)\.json")

_Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
_Content = tuple[list[_Number], list[Annotated[list[_Number], Meta(min_length=9, max_length=9)]]]


@dataclass(frozen=True, slots=True)
class Categories:
    """The bytes of each category on one device over time; `time_ns` is on the trace's own clock.

    `start_bytes` is what each held when the window began, as far as the window shows it. Where nothing changed, the one
    time is 0.
    """

    device: str
    time_ns: Ints
    live_bytes: Mapping[str, Ints]
    start_bytes: Mapping[str, int]

    @property
    def level_bytes(self) -> Ints:
        """What all categories together held."""
        return sum(self.live_bytes.values(), np.zeros(len(self.time_ns), np.int64))

    def plot(self, points: int = 1000) -> Plot:
        """Thinned for a plot, as `instrument.analysis.memory_timeline.MemoryView.curve`."""
        kept = extremes(self.level_bytes, self.time_ns, points)
        series = {
            name: sizes[kept].tolist() for name, sizes in self.live_bytes.items() if sizes.any()
        }
        return Plot(self.device, self.time_ns[kept].tolist(), None, series)


def file_of(device: str, *, raw: bool = False) -> str:
    """The name of a device's file in a capture; `raw`: of the one with every change."""
    return f"memory_categories_{device.replace(':', '-')}{'.raw.json.gz' if raw else '.json'}"


def read(folder: Path, base_ns: int) -> list[Categories]:
    """The categories of a capture's devices, the CPU last; none where `profiler.memory_categories` was off.

    `base_ns` is the Unix time of the trace's clock at 0.

    Raises:
        CaptureError: a file holds something else, or more than 64 MB.
    """
    named = [(path, _FILE.fullmatch(path.name)) for path in sorted(folder.glob(PATTERN))]
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
            f"The file {path} holds {len(times)} times and {len(sizes)} sizes: remove it."
        )
    held_before = times[0] < 0 or times[:1] == times[1:2]
    time_ns = np.zeros(1, np.int64) if times == [-1] else np.array(times, np.int64) * 1000 - base_ns
    columns = np.array(sizes, np.int64).T[1:]
    start = [int(column[0]) if held_before else 0 for column in columns]
    return Categories(device, time_ns, dict(zip(CATEGORIES, columns)), dict(zip(CATEGORIES, start)))


MEMORY_CATEGORIES: Schema = schema(
    device="the device, as torch writes it",
    category="torch's category: parameter, activation, gradient, …; unknown is what torch cannot classify",
    at_peak_bytes="what it held when all categories together held the most",
    max_bytes="the most that it held at any time",
    start_bytes="what it held when the window began",
    end_bytes="what it held at the window's end",
)


def table(found: Sequence[Categories]) -> Table:
    """A row for each category that held anything, the largest at the peak first; see `MEMORY_CATEGORIES`.

    The peak is the first time at which all categories together held the most. All is torch's own account: it knows of
    what lived before the window only what the window uses, and does not see that freed on the CPU; a tensor that is
    written over may change its category for a while.
    """
    rows = []
    for each in found:
        peak = int(np.argmax(each.level_bytes))
        held = [(name, sizes) for name, sizes in each.live_bytes.items() if sizes.any()]
        for name, sizes in sorted(held, key=lambda pair: -int(pair[1][peak])):
            at_peak, most, end = int(sizes[peak]), int(sizes.max()), int(sizes[-1])
            rows.append((each.device, name, at_peak, most, each.start_bytes[name], end))
    names = names_of(MEMORY_CATEGORIES)
    return Table.of(
        MEMORY_CATEGORIES, {name: [row[k] for row in rows] for k, name in enumerate(names)}
    )
