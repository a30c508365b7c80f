"""A sink that writes folded stacks, the input of flame graphs."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import field_validator

from instrument.base import files
from instrument.base.errors import CaptureError
from instrument.export.sinks.sink import Sink

if TYPE_CHECKING:
    from instrument.read.capture import Capture

_TORCH_METRICS = {
    "self_cpu_time_total": "cpu",
    "self_cuda_time_total": "device",
    "self_device_time_total": "device",
}
_CALLED = {"cpu": "CPU", "device": "device"}


class Stacks(Sink):
    """Writes `stacks.txt`: a line for each call path, with the self time of the path in µs.

    A frame of a path is a Python function, a range or an operator; the file holds only the names of
    frames, not their kinds. The outermost frame comes first. Paths below 0.5 µs are left out.
    speedscope.app opens the file. Without `with_stack`, the frames are the lines that samples of
    the whole run found (`profiler.lines`), for `metric=cpu` and without a range.

    Cost: about 1 µs per event, besides reading the trace. Recording stacks costs much more.
    """

    sink_name: ClassVar[str] = "stacks"

    metric: Literal["cpu", "device"] = "cpu"
    """`cpu`, or `device` for the time of kernels; torch's names work too."""

    range: str | None = None
    """The name or path of a range; None: all frames. Only frames in the range and in its backward
    pass count."""

    @field_validator("metric", mode="before")
    @classmethod
    def _own_name(cls, metric: Any) -> Any:
        return _TORCH_METRICS.get(metric, metric) if isinstance(metric, str) else metric

    @property
    def needs(self) -> tuple[str, ...]:
        """The option that records Python frames."""
        return ("with_stack",)

    def write(self, capture: Capture, folder: Path) -> None:
        """Write `stacks.txt`.

        Raises:
            CaptureError: the trace holds no Python frames, does not hold the range of the option
                `range`, holds no device activity although `metric` is `device`, or holds no call
                path with any time.
        """
        from instrument.read.views.stacks import folded

        found = capture.stacks(self.metric, range=self.range)
        lines = folded(found)
        if (first := next(lines, None)) is None:
            raise CaptureError(
                f"No call path of {capture.name} has {_CALLED[self.metric]} time, so there are no "
                "stacks to write."
            )
        with files.replacing(folder / "stacks.txt") as file:
            file.writelines(each.encode("utf-8", "replace") for each in chain([first], lines))
