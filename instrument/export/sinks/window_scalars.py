"""The scalars of a window, for TensorBoard and experiment trackers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from instrument.base.errors import InstrumentError

if TYPE_CHECKING:
    from instrument.read.capture import Capture

# For each tag on the cost of recording: the fields of `capture.about.cost` whose sum in ms is the
# value of the tag.
_COSTS = {
    "recorded_step_ms": ["recorded_step_ns"],
    "unrecorded_step_ms": ["unrecorded_step_ns"],
    "start_ms": ["start_ns"],
    "end_ms": ["stop_ns", "save_ns"],
    "export_ms": ["export_ns"],
}


def numbers(capture: Capture) -> dict[str, float]:
    """The content of `scalars.json`: `rank`, `step` (see `last_step`), and the scalars by tag.

    If the trace cannot be read, only `rank` and `step`.
    """
    found: dict[str, float] = {"rank": capture.about.rank or 0, "step": 0}
    with suppress(InstrumentError):
        found["step"] = last_step(capture)
        found |= scalars(capture)
    return found


def scalars(capture: Capture) -> Iterator[tuple[str, float]]:
    """Yield pairs of a tag and a value for a window; unknown quantities are left out.

    - `window/steps`, `window/step_ms` (the mean of the steps that count), `window/cpu_ms` and
      `window/device_ms` (sums over all operators).
    - `ranges/<path>/calls`: the calls of a range in the window. `ranges/<path>/cpu_ms` and
      `ranges/<path>/device_ms`: the CPU time of the range, and the device time of the work that the
      range launched, in ms per finished step. In a window without steps, both times are totals.
    - `cost/recorded_step_ms`, `cost/unrecorded_step_ms`: the usual time of the recorded steps, and
      of the steps before the window.
    - `cost/start_ms`, `cost/end_ms`: how long training waited at the start and at the end of the
      window. `cost/export_ms`: how long the export has taken so far. `cost/trace_bytes`: the size
      of the trace.
    - `coverage/…`: the shares in `capture.coverage` that show a loss of data, such as
      `coverage/device_time_with_a_launch`. Without a loss, there are no such tags.
    """
    from instrument.read.views.coverage import incomplete

    steps, operators, cost = capture.links.steps, capture.operators.frame, capture.about.cost
    yield "window/steps", len(steps)
    if len(steps):
        counted = capture.links.counted_steps
        yield "window/step_ms", counted.total_ns / counted.count / 1e6
    for tag, column in (("cpu_ms", "self_cpu_ns"), ("device_ms", "self_device_ns")):
        if known := operators[column].drop_nulls().to_list():
            yield f"window/{tag}", sum(known) / 1e6
    for tag, parts in _COSTS.items():
        found = [getattr(cost, part) for part in parts]
        if None not in found:
            yield f"cost/{tag}", sum(found) / 1e6
    if cost.trace_bytes is not None:
        yield "cost/trace_bytes", cost.trace_bytes
    for row in incomplete(capture):
        if row.share is not None:
            yield f"coverage/{row.name.replace(' ', '_')}", row.share
    for row in capture.ranges:
        yield f"ranges/{row.path}/calls", row.calls
        cpu_ns, device_ns = (
            (row.cpu_ns_per_step, row.device_ns_per_step)
            if len(steps)
            else (row.cpu_ns, row.device_ns)
        )
        yield f"ranges/{row.path}/cpu_ms", cpu_ns / 1e6
        if device_ns is not None:
            yield f"ranges/{row.path}/device_ms", device_ns / 1e6


def last_step(capture: Capture) -> int:
    """The window's last complete step, which its scalars belong to; else its first step."""
    window = capture.about.window
    if window.last_step is not None:
        return window.last_step
    if window.first_step is not None:
        return window.first_step
    return max(capture.steps.column("number"), default=0)
