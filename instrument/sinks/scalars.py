"""A window in numbers, for whatever draws curves over windows."""

from __future__ import annotations

from collections.abc import Iterator

from instrument.capture import Capture

# What recording cost, in ms of the sums of these.
_COSTS = {
    "recorded_step_ms": ["recorded_step_ns"],
    "unrecorded_step_ms": ["unrecorded_step_ns"],
    "start_ms": ["start_ns"],
    "end_ms": ["stop_ns", "save_ns"],
    "export_ms": ["export_ns"],
}


def scalars(capture: Capture) -> Iterator[tuple[str, float]]:
    """What TensorBoard and the trackers are told of a window, as tag and value; unknown quantities are left out.

    `ranges/<path>/cpu_ms` and `device_ms` are milliseconds per finished step of what lies in those, or was launched in
    them; of the whole recording where it holds no steps. `ranges/<path>/calls` counts the calls of the window.
    `window/steps`, `window/step_ms` (mean), `window/cpu_ms` and `window/device_ms` (sums over all operators) are of
    the window. `cost/…` is what recording it cost the run: medians of a recorded step and of those before the window,
    how long the loop stood still at its start and end, how long the export took until this was written, and the size of
    the trace.
    """
    steps, operators, cost = capture.steps, capture.operators, capture.about.cost
    yield "window/steps", len(steps)
    if len(steps):
        yield "window/step_ms", sum(steps.column("duration_ns")) / len(steps) / 1e6
    for tag, column in (("cpu_ms", "self_cpu_ns"), ("device_ms", "self_device_ns")):
        known = [value for value in operators.column(column) if value is not None]
        if known:
            yield f"window/{tag}", sum(known) / 1e6
    for tag, parts in _COSTS.items():
        found = [getattr(cost, part) for part in parts]
        if None not in found:
            yield f"cost/{tag}", sum(found) / 1e6
    if cost.trace_bytes is not None:
        yield "cost/trace_bytes", cost.trace_bytes
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
    """The training step at which the window's scalars stand: its last, or its first where none was finished."""
    window = capture.about.window
    told = [step for step in (window.last_step, window.first_step) if step is not None]
    return told[0] if told else max(capture.steps.column("number"), default=0)
