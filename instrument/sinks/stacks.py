"""Folded stacks, for a flame graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from instrument import files
from instrument.analysis.stacks import folded
from instrument.capture import Capture
from instrument.errors import CaptureError
from instrument.report.flame import svg
from instrument.sinks import Sink

_TORCH_METRICS = {
    "self_cpu_time_total": "cpu",
    "self_cuda_time_total": "device",
    "self_device_time_total": "device",
}
_CALLED = {"cpu": "CPU", "device": "device"}


class Stacks(Sink):
    """Writes `stacks.txt`: a line for each call path, outermost first, with the µs spent in its last frame itself.

    `stacks.svg` is its flame graph as a picture, where that is asked for; speedscope.app opens the text. Python
    frames, ranges and operators are told apart by their names alone. Paths of less than half a microsecond are left
    out.

    Cost: about 1 µs an event, on top of reading the trace; recording stacks is what is dear.
    """

    sink_name: ClassVar[str] = "stacks"

    metric: Literal["cpu", "device"] = "cpu"
    """Which time: `cpu`, or `device` for what the kernels took; torch's names for them are understood."""

    range: str | None = None
    """Only what ran inside this range and its backward, given by its name or its path; None: everything."""

    threads: bool = False
    """Whether each path begins with its thread; otherwise threads are put together."""

    svg: bool = False
    """Whether `stacks.svg` is written too, the flame graph as a picture that any browser shows."""

    @field_validator("metric", mode="before")
    @classmethod
    def _own_name(cls, metric: Any) -> Any:
        return _TORCH_METRICS.get(metric, metric) if isinstance(metric, str) else metric

    @property
    def needs(self) -> tuple[str, ...]:
        """Python frames, which only `with_stack` records."""
        return ("with_stack",)

    def write(self, capture: Capture, folder: Path) -> None:
        """Write `stacks.txt`, and `stacks.svg` where it is asked for, unless they would be empty.

        Raises:
            CaptureError: the trace holds no Python frames, no such range, no device activity for `device`, or no
                time in any path.
            TraceError: the trace cannot be read.
        """
        found = capture.stacks(self.metric, range=self.range, threads=self.threads)
        text = folded(found)
        if not text:
            raise CaptureError(
                f"No call path of {capture.name} has {_CALLED[self.metric]} time, so there are no stacks to write."
            )
        files.write(folder / "stacks.txt", text)
        if self.svg:
            inside = f" in {self.range}" if self.range else ""
            files.write(
                folder / "stacks.svg",
                svg(found, f"{capture.name}: {_CALLED[self.metric]} time{inside}"),
            )
