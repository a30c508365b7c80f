"""What a capture is of, in a few lines of text, and its page in a notebook."""

from __future__ import annotations

from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from instrument.capture.table import Table, duration
from instrument.errors import InstrumentError

if TYPE_CHECKING:
    from instrument.capture import Capture

_RANGE_COLUMNS = (
    "name", "calls", "host_ns", "host_ns_per_step", "share", "self_host_ns", "forward_ns", "backward_ns", "device_ns",
)  # fmt: skip
_RANGES, _OPERATORS = 20, 10
# Unrecorded steps that recorded ones are compared with.
_ENOUGH_STEPS = 10


def heading(capture: Capture) -> str:
    """The capture's name with its steps, torch, devices and rank; what cut it short; where it lies: a line each.

    Raises:
        CaptureError, TraceError: as `capture.steps`.
    """
    about, window = capture.metadata, capture.metadata.get("window", {})
    facts = [_steps(capture)]
    if "torch" in about.get("versions", {}):
        facts.append(f"torch {about['versions']['torch']}")
    if "devices" in about:
        facts.append(", ".join(dict.fromkeys(about["devices"])) or "no device")
    if about.get("world_size", 1) > 1:
        facts.append(f"rank {about['rank']} of {about['world_size']}")
    planned = f" of {window['planned_steps']}" if window.get("planned_steps") else ""
    cut = f"\nTruncated after {window['steps']}{planned} steps: {window['reason']}." if window.get("truncated") else ""
    if capture.events.cut_short:
        cut += f"\nThe trace file ends too early: only its first {capture.events.recorded} events are here."
    where = capture.place
    return f"{capture.name}: {', '.join(facts)}{cut}\n{where.absolute() if where else ''}".rstrip()


def _steps(capture: Capture) -> str:
    numbers = capture.steps.column("number")
    if not numbers:
        return "no steps marked"
    first, last = min(numbers), max(numbers)
    return f"step {first}" if first == last else f"steps {first}–{last}"


def cost(capture: Capture) -> str:
    """What recording cost the run, in a sentence; empty where that was not measured.

    What a sink is told of the export's time is that until then.
    """
    about = capture.metadata.get("cost", {})
    recorded, before = about.get("recorded_step_ns"), about.get("unrecorded_step_ns")
    said = []
    if recorded is not None:
        beside = f", {duration(before)} before the window{_more(recorded, about)}" if before else ""
        said.append(f"a recorded step took {duration(recorded)}{beside}")
    if "stop_ns" in about:
        start, end = about["start_ns"], about["stop_ns"] + about["save_ns"]
        said.append(f"the loop stood still {duration(start)} at the start and {duration(end)} at the end")
    if "trace_bytes" in about:
        packed = f", {about['packed_bytes'] / 1e6:.3g} packed" if "packed_bytes" in about else ""
        said.append(f"the trace has {about['trace_bytes'] / 1e6:.3g} MB{packed}")
    if "export_ns" in about:
        unfinished = capture.place != (capture.folder or capture.trace_path)
        said.append(f"its export {'had taken' if unfinished else 'took'} {duration(about['export_ns'])}")
        said[-1] += " when this was written" if unfinished else ""
    return f"Cost of recording: {'; '.join(said)}." if said else ""


def _more(recorded: int, cost: dict[str, Any]) -> str:
    """How much more a recorded step took; not said after a few steps, of which the first are like no other."""
    before, steps = cost["unrecorded_step_ns"], cost["unrecorded_steps"]
    return f" ({recorded / before - 1:+.0%})" if steps >= _ENOUGH_STEPS and recorded > before else ""


def outline(ranges: Table, rows: int) -> Table:
    """Those ranges that have the most host time, at most `rows`, in the order of the tree, names indented by depth."""
    order = sorted(range(len(ranges)), key=lambda i: -ranges[i].host_ns)[:rows]  # a parent goes before its children
    kept = [ranges[i] for i in sorted(order)]
    return Table(
        {
            "name": ["  " * row.depth + row.name for row in kept],
            **{name: [getattr(row, name) for row in kept] for name in ranges.columns if name != "name"},
        }
    )


def to_html(capture: Capture) -> str:
    """The capture as a part of an HTML page: its heading, range tree and costliest operators, and the views it has.

    A trace that cannot be read leaves the reason in their place.
    """
    try:
        first, *rest = heading(capture).splitlines()
        tables = _ranges(capture.ranges) + _operators(capture.operators)
    except InstrumentError as error:
        first, rest, tables = capture.name, [str(error)], ""
    lines = "<br>".join([f"<b>{escape(first)}</b>", *map(escape, rest)])
    return f"<div><p>{lines}</p>{tables}{_views(type(capture))}</div>"


def _ranges(ranges: Table) -> str:
    if not len(ranges):
        return "<p>No ranges: mark code with <code>@profiled</code>.</p>"
    shown = outline(ranges, _RANGES)
    few = "" if len(shown) == len(ranges) else f", the {len(shown)} of {len(ranges)} with the most host time"
    return f"<p>Ranges{few}</p>{shown.select(_RANGE_COLUMNS)._repr_html_()}"


def _operators(operators: Table) -> str:
    if not len(operators):
        return "<p>No operators.</p>"
    on_device = any(operators.column("self_device_ns"))
    key = "self_device_ns" if on_device else "self_host_ns"
    shown = operators.sort(key).head(_OPERATORS)
    return f"<p>Operators, {len(shown)} of {len(operators)}, by {key}</p>{shown._repr_html_()}"


def _views(kind: type[Capture]) -> str:
    """The names of the views, each with the first line of its documentation as a tooltip."""
    views = {name: view.__doc__ or "" for name, view in vars(kind).items() if isinstance(view, cached_property)}
    views["stacks()"] = kind.stacks.__doc__ or ""
    names = (f'<code title="{escape(doc.splitlines()[0])}">{name}</code>' for name, doc in sorted(views.items()))
    return f"<p>Views: {', '.join(names)}</p>"
