"""A capture's heading, remarks and titles of tables, as sentences."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from instrument.base.range_names import REGION
from instrument.base.units import counted, duration, few, percent_change, size
from instrument.read.trace.capture_json import unix_time
from instrument.read.views import coverage_rows
from instrument.read.views.coverage import line, part, unrecorded_threads
from instrument.read.views.phases import steps_in_words
from instrument.read.views.ranges import shared_ns
from instrument.read.views.table import Table
from instrument.read.views.table_text import heading as column_title
from instrument.read.views.views import Views, rows_of
from instrument.read.views.witness import consequences

# The heading shows the losses of data in these rows of `capture.coverage`.
HEADING_ROWS = (coverage_rows.PLANNED, coverage_rows.READ, coverage_rows.VALID)
# The most modules without a call that the text names.
_FEW = 4


def heading(capture: Views) -> list[str]:
    """Return the lines that identify a capture: name, steps, torch's version, devices, rank, path.

    Sentences on missing data come before the path.

    Raises:
        CaptureError, TraceError: as for `capture.steps`.
    """
    where = capture.place
    lines = [
        f"{capture.name}: {', '.join(facts(capture))}",
        *_notes(capture),
        str(where.absolute()) if isinstance(where, Path) else where or "",
    ]
    return [line for line in lines if line]


def facts(capture: Views) -> list[str]:
    """Return short texts on a capture: its steps, torch's version, the devices, the rank, a cut."""
    about, numbers = capture.about, capture.links.step_numbers
    found = [_steps_of(numbers) if numbers else steps_in_words(capture) or "no steps marked"]
    if (part := about.window.part) is not None:
        first = about.window.part_of_step
        found.append(f"part {part + 1} of the window from step {first} on")
    if "torch" in about.versions:
        found.append(f"torch {about.versions['torch']}")
    if about.devices is not None:
        found.append(", ".join(dict.fromkeys(about.devices)) or "no device")
    if about.world_size is not None and about.world_size > 1:
        found.append(f"rank {'?' if about.rank is None else about.rank} of {about.world_size}")
    if capture.events.cut_short:
        found.append("trace cut short")
    return found


def origin(capture: Views) -> list[str]:
    """Return short texts on a capture's run: its command, date and machine, and what was recorded.

    What is not known is left out.
    """
    about, events, started_s = capture.about, capture.events, unix_time(capture.about.started_at)
    date = None if started_s is None else datetime.fromtimestamp(started_s)
    cpus = about.machine.cpus
    recorded = {
        "operators": True,
        "device work": len(capture.work.event) > 0,
        "input shapes": (events.types >= 0).any(),
        "memory": len(events.memory) > 0,
        "Python stacks": len(capture.links.frames) > 0 or (events.call_stack >= 0).any(),
    }
    texts = [
        shlex.join(about.command),
        date and date.isoformat(" ", "minutes"),
        about.host,
        about.machine.processor,
        cpus and counted(cpus, "CPU"),
        f"recorded: {', '.join(name for name, is_on in recorded.items() if is_on)}",
    ]
    return [text for text in texts if text]


def _notes(capture: Views) -> Iterator[str]:
    """Sentences on what is missing from the window or its trace."""
    for name in HEADING_ROWS:
        row = part(capture, name)
        if row is not None and row.why:
            yield row.why
    yield from consequences(capture)


def _steps_of(numbers: Sequence[int]) -> str:
    first, last = min(numbers), max(numbers)
    return f"step {first}" if first == last else f"steps {first}–{last}"


def cost(capture: Views) -> str:
    """Return a line on the cost of recording, at most 80 characters; "" if it is not known."""
    cost, parts = capture.about.cost, []
    undisturbed = part(capture, coverage_rows.UNDISTURBED)
    if undisturbed is not None and undisturbed.share:
        parts.append(f"steps {percent_change(1 / undisturbed.share - 1)}")
    if cost.start_ns is not None and cost.stop_ns is not None and cost.save_ns is not None:
        parts.append(f"start and end {duration(cost.start_ns + cost.stop_ns + cost.save_ns)}")
    budget_ms = capture.about.config.max_stall_ms
    if budget_ms is not None and cost.stall_ns is not None and cost.stall_ns > budget_ms * 1e6:
        parts[1:] = [f"the end {duration(cost.stall_ns)}, more than {duration(budget_ms * 1e6)}"]
    if cost.packed_bytes is not None:
        parts.append(f"trace {size(cost.packed_bytes)}")
    return f"Cost of recording: {', '.join(parts)}." if parts else ""


def _share_is(capture: Views, of: str) -> str:
    """Return what the shares of ranges and operators are: the steps and the CPU time they are of.

    The times in the table are of all steps, so the quotient is not one of two of its numbers.
    """
    numbers = capture.links.step_numbers
    kept = capture.links.counted_steps.kept
    window = _steps_of(numbers[kept]) if numbers else "the recording"
    return f"share = {of} in {window} / {duration(shared_ns(capture))} on all threads"


def incomplete(capture: Views, views: Sequence[str]) -> str:
    """Return a line on what is missing from the given views; "" if nothing is missing.

    `views` holds the names of views; "ranges" and "operators" together stand for all views. The
    line leaves out missing data that `heading` reports.
    """
    return line(capture, [name for name in rows_of(views) if name not in HEADING_ROWS])


def not_timed(capture: Views) -> list[str]:
    """Return lines on ranges inside compiled regions, modules without a call, and other threads."""
    by_region: dict[str, list[str]] = {}
    for row in capture.compiled_ranges:
        by_region.setdefault(row.region, []).append(row.name)
    lines = [
        f"Ranges inside compiled region {region}, not timed: {', '.join(names)}"
        for region, names in by_region.items()
    ]
    if unseen := capture.about.modules_not_seen:
        compiled = any(name.startswith(REGION) for name in capture.events.names)
        where = ", or inside a compiled region" if compiled else ""
        lines.append(f"Modules not called in this window{where}: {_few_modules(unseen)}")
    if others := unrecorded_threads(capture):
        lines.append(f"Not recorded: {others}")
    return lines


def _few_modules(names: Sequence[str]) -> str:
    """Return the first few modules as text: outer ones, with the number of modules inside them."""
    inside: dict[str, int] = {}
    outer = ""
    # With "\0" instead of ".", the submodules of a module follow directly after it.
    for name in sorted(names, key=lambda name: name.replace(".", "\0")):
        if inside and name.startswith(outer) and name[len(outer) : len(outer) + 1] == ".":
            inside[outer] += 1
        else:
            outer, inside[name] = name, 0
    shown = [f"{name} (with {count} inside)" if count else name for name, count in inside.items()]
    return few(shown, _FEW)


def not_recorded(capture: Views, operators: Table) -> str:
    """Return a line that lists what was not recorded, with the options that turned it off."""
    about, config = capture.about, capture.about.config
    cpu_only = "activities=[cpu]" if config.activities == ["cpu"] else "no device"
    reasons = {
        "device times": ("device_ns", cpu_only if about.devices == [] else ""),
        "memory": ("cpu_bytes", "profile_memory=false" if config.profile_memory is False else ""),
        "FLOPs": ("flops", "with_flops=false" if config.with_flops is False else ""),
    }
    unknown = {
        column
        for column, _ in reasons.values()
        if operators.column(column).count(None) == len(operators)
    }
    missing = [
        f"{what} ({why})" if why else what
        for what, (column, why) in reasons.items()
        if column in unknown
    ]
    return f"Not recorded: {', '.join(missing)}." if missing else ""


def ranges_title(capture: Views, rows: int, count: int, by: str | None = None) -> str:
    """Return the title of the tree of ranges, or of the first `rows` ranges sorted by `by`."""
    some = "" if by is None else f", {rows} of {count}, by {column_title(by)}"
    return f"Ranges{some}; {_share_is(capture, 'self total (with backward)')}"


def operators_title(capture: Views, rows: int, count: int, by: str) -> str:
    """Return the title of the operator table, which shows the first `rows` of `count` operators."""
    of_device = "; device share = self device / all device time" if len(capture.work.event) else ""
    return (
        f"Operators, {min(rows, count)} of {count}, by {by}; "
        f"{_share_is(capture, 'self CPU')}{of_device}"
    )
