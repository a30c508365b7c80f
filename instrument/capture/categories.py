"""What lived in memory by what it was for, as torch classified it when the window ended.

torch writes a file for each device, `[times, sizes]`: Unix times in µs, and for each the bytes of every category behind
a 0 (`export_memory_timeline` in torch/profiler/_memory_profiler.py). What lived before has the first event's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from instrument import files
from instrument.capture.events import Ints
from instrument.capture.live_memory import Plot, extremes
from instrument.capture.metadata import BAD_JSON
from instrument.capture.table import Table
from instrument.errors import CaptureError

UNCLASSIFIED = "unknown"
# In the order of torch's columns. The last is what torch cannot tell.
CATEGORIES = (
    "parameter", "optimizer state", "input", "temporary", "activation", "gradient", "autograd detail", UNCLASSIFIED,
)  # fmt: skip
_PREFIX, _SUFFIX = "memory_categories_", ".json"
_MOST_BYTES = 1 << 30  # some five million operators

_Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]
_Content = tuple[list[_Number], list[Annotated[list[_Number], Meta(min_length=9, max_length=9)]]]


@dataclass(frozen=True, slots=True)
class Categories:
    """The bytes of each category on one device over time; `time_ns` is on the trace's own clock.

    What lived when the window began stands at its own first time, doubled.
    """

    device: str
    time_ns: Ints
    live_bytes: Mapping[str, Ints]

    @property
    def level_bytes(self) -> Ints:
        """What all categories together held."""
        return sum(self.live_bytes.values(), np.zeros(len(self.time_ns), np.int64))

    def before(self, sizes: Ints) -> int:
        """What a category held when the window began."""
        begun = len(self.time_ns) > 1 and self.time_ns[0] == self.time_ns[1]
        return int(sizes[0]) if begun else 0

    def plot(self, points: int = 1000) -> Plot:
        """Thinned for a plot, as `instrument.capture.live_memory.MemoryView.curve`."""
        kept = extremes(self.level_bytes, self.time_ns, points)
        series = {name: sizes[kept].tolist() for name, sizes in self.live_bytes.items() if sizes.any()}
        return Plot(self.device, self.time_ns[kept].tolist(), None, series)


def file_of(device: str, *, raw: bool = False) -> str:
    """The name of a device's file in a capture; `raw`: of the one with every change."""
    return f"{_PREFIX}{device.replace(':', '-')}{'.raw.json.gz' if raw else _SUFFIX}"


def read(folder: Path, base_ns: int) -> list[Categories]:
    """The categories of a capture's devices, the host last; none where `profiler.memory_categories` was off.

    `base_ns` is the Unix time of the trace's clock at 0.

    Raises:
        CaptureError: a file holds something else.
    """
    names = [path.name for path in folder.glob(f"{_PREFIX}*{_SUFFIX}")]
    devices = [name.removeprefix(_PREFIX).removesuffix(_SUFFIX).replace("-", ":") for name in names]
    return [_read(folder, device, base_ns) for device in sorted(devices, key=lambda name: (name == "cpu", name))]


def _read(folder: Path, device: str, base_ns: int) -> Categories:
    path = folder / file_of(device)
    try:
        times, sizes = msgspec.json.decode(files.read_bytes(path, _MOST_BYTES), type=_Content)
    except OSError as error:
        raise CaptureError(f"The file {path} cannot be read: {error.strerror}.") from None
    except BAD_JSON as error:
        raise CaptureError(f"The file {path} cannot be understood ({error}): remove it.") from None
    if len(times) != len(sizes) or not times:
        raise CaptureError(f"The file {path} holds {len(times)} times and {len(sizes)} sizes: remove it.")
    columns = np.array(sizes, np.int64).T[1:]
    return Categories(device, np.array(times, np.int64) * 1000 - base_ns, dict(zip(CATEGORIES, columns)))


def table(found: Sequence[Categories]) -> Table:
    """What each category held: `device category at_peak_bytes max_bytes start_bytes end_bytes`.

    A row for each category that held anything, the largest at the peak first: the first time at which all categories
    together held the most. `max_bytes` is the most that the category held at any time, `start_bytes` what it held when
    the window began, `end_bytes` at its end. Bytes are those of tensors as torch knows them from shapes and
    allocations; "unknown" is what it could not classify.
    """
    rows = []
    for each in found:
        peak = int(np.argmax(each.level_bytes))
        held = [(name, sizes) for name, sizes in each.live_bytes.items() if sizes.any()]
        for name, sizes in sorted(held, key=lambda pair: -int(pair[1][peak])):
            at_peak, most, end = int(sizes[peak]), int(sizes.max()), int(sizes[-1])
            rows.append((each.device, name, at_peak, most, each.before(sizes), end))
    columns = ("device", "category", "at_peak_bytes", "max_bytes", "start_bytes", "end_bytes")
    return Table({name: [row[k] for row in rows] for k, name in enumerate(columns)})
