"""A capture's heading and remarks as sentences, and the HTML that a notebook shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from instrument.analysis import coverage_rows
from instrument.analysis.coverage import line, part, range_advice
from instrument.analysis.steps import waits
from instrument.analysis.table import Table, sum_of_known
from instrument.analysis.views import VIEWS, Views, rows_of
from instrument.errors import InstrumentError
from instrument.range_names import RECOMPUTED, REGION
from instrument.templates import render
from instrument.units import counted, duration, few, size

_RANGE_COLUMNS = (
    "name", "calls", "cpu_ns", "cpu_ns_per_step", "share", "device_share", "self_total_ns",
    "total_ns", "forward_ns", "backward_ns", "device_ns",
)  # fmt: skip
# The kinds of rows in the operator table that are no operators: ranges, steps, moments (from
# `instrument.mark`) and waits for data.
_NO_OPERATORS = frozenset({"range", "step", "mark", "loader"})
# Columns that can be summed over ranges or operators, because each nanosecond counts only once.
OWN_COLUMNS = ("self_cpu_ns", "self_total_ns", "self_device_ns", "share", "device_share")
_RANGES, _OPERATORS = 20, 10
# `DEVICE_PARTS` has the words for each part of the device's time. `_BOUND_BY` has a sentence for
# each cause of lost device time. The text shows only the sentence for the largest cause.
DEVICE_PARTS = {
    "compute_ns": "computing",
    "exposed_communication_ns": "exposed communication",
    "exposed_copy_ns": "exposed copies",
    "idle_ns": "idle",
}
_BOUND_BY = {
    "exposed_communication_ns": "Bound by communication: {:.0%} of the time, the device only "
    "communicates (--collectives).",
    "exposed_copy_ns": "Bound by copies: {:.0%} of the time, the device only copies (--copies).",
    "loader_wait_ns": "Waiting for data: {:.0%} of the time, the device is idle while the CPU "
    "waits for data.",
    "launch_wait_ns": "CPU-bound: {:.0%} of the time, the device is idle until the CPU launches "
    "work (--queue, --steps).",
    "sync_wait_ns": "Bound by synchronization: {:.0%} of the time, the device is idle because the "
    "CPU first waited for the device and only then launched more work.",
}
# A cause is a bottleneck if it takes at least this fraction of the device's time. In real traces,
# bottlenecks take a quarter or more.
_BINDING = 0.2
# The heading shows the losses of data in these rows of `capture.coverage`.
HEADING_ROWS = (coverage_rows.PLANNED, coverage_rows.READ, coverage_rows.VALID)
# If less than this fraction of the time is in ranges, the text advises which code to mark.
_MARKED = 0.5
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
    about, found = capture.about, [_steps(capture)]
    if "torch" in about.versions:
        found.append(f"torch {about.versions['torch']}")
    if about.devices is not None:
        found.append(", ".join(dict.fromkeys(about.devices)) or "no device")
    if about.world_size is not None and about.world_size > 1:
        found.append(f"rank {'?' if about.rank is None else about.rank} of {about.world_size}")
    if capture.events.cut_short:
        found.append("trace cut short")
    return found


def _notes(capture: Views) -> Iterator[str]:
    """Sentences on what is missing from the window or its trace."""
    for name in HEADING_ROWS:
        row = part(capture, name)
        if row is not None and row.why:
            yield row.why


def _steps(capture: Views) -> str:
    numbers = capture.steps.column("number")
    if not numbers:
        return "no steps marked"
    first, last = min(numbers), max(numbers)
    return f"step {first}" if first == last else f"steps {first}–{last}"


def cost(capture: Views) -> str:
    """Return a line on the cost of recording, at most 80 characters; "" if the cost is not known.

    The line says how much longer a recorded step is than a step before the window. The line also
    gives the time that training waited when the window began and ended, and the size of the
    compressed trace.
    """
    cost, parts = capture.about.cost, []
    undisturbed = part(capture, coverage_rows.UNDISTURBED)
    if undisturbed is not None and undisturbed.share:
        parts.append(f"steps {1 / undisturbed.share - 1:+.0%}")
    if cost.start_ns is not None and cost.stop_ns is not None and cost.save_ns is not None:
        parts.append(f"start and end {duration(cost.start_ns + cost.stop_ns + cost.save_ns)}")
    if cost.packed_bytes is not None:
        parts.append(f"trace {size(cost.packed_bytes)}")
    return f"Cost of recording: {', '.join(parts)}." if parts else ""


def outline(capture: Views, rows: int) -> Table:
    """Return the ranges that take most time, and all their ancestors, in tree order.

    The time is device time, or CPU time if no device time was recorded. At most `rows` ranges are
    kept; one row sums all other ranges. Names are indented by depth. The last rows are those of the
    view `ranges_rest`: the time outside of all ranges. So the shares of all rows add up to 1.
    """
    ranges = capture.ranges
    kept = with_largest_shares(ranges, rows)
    columns = {name: [ranges.column(name)[i] for i in kept] for name in ranges.columns}
    labels = zip(columns["depth"], columns["name"], columns["module_type"])
    columns["name"] = ["  " * depth + with_type(name, kind) for depth, name, kind in labels]
    others = set(range(len(ranges))) - set(kept)
    more = capture.ranges_rest.to_dicts()
    if others:
        left_out = [row for at, row in enumerate(ranges) if at in others]
        more.insert(0, _summed(f"({counted(len(others), 'other range')})", left_out))
    return _extended(columns, more)


def leading(operators: Table, sort: str, rows: int) -> Table:
    """Return the operators with the largest values of a column, and rows that sum all the rest.

    One row sums the operators that are left out. Another row sums the time outside of operators:
    the self time of ranges, steps, moments (from `instrument.mark`) and waits for data. So the
    shares of all rows add up to 1.
    """
    ordered = without_ranges(operators).sort(sort)
    shown, outside = ordered.head(rows), operators.where(lambda row: row.kind in _NO_OPERATORS)
    left_out = [ordered[at] for at in range(len(shown), len(ordered))]
    more = []
    if left_out:
        more.append(_summed(f"({counted(len(left_out), 'other operator')})", left_out))
    if any(outside.column("self_cpu_ns")) or any(outside.column("self_device_ns")):
        more.append(_summed("(in no operator)", outside))
    return _extended({name: shown.column(name) for name in shown.columns}, more)


def _summed(name: str, rows: Iterable[Any]) -> dict[str, Any]:
    """Return a row that sums the columns `OWN_COLUMNS` of `rows`; other cells stay unknown."""
    rows = [*rows]
    sums = {own: sum_of_known(getattr(row, own, None) for row in rows) for own in OWN_COLUMNS}
    return {"name": name, **sums}


def _extended(columns: Mapping[str, list[Any]], more: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with the rows of `more` at its end; cells that `more` lacks are unknown."""
    return Table(
        {name: [*cells, *(row.get(name) for row in more)] for name, cells in columns.items()}
    )


def with_largest_shares(ranges: Table, rows: int) -> list[int]:
    """Return the positions of the ranges with the largest shares, and of all their ancestors.

    At most `rows` positions are returned, in the order of the tree. See `outline` for the shares.
    Cost: sorts the ranges once.
    """
    if len(ranges) <= rows:
        return [*range(len(ranges))]
    share = ranges.column("device_share" if any(ranges.column("device_share")) else "share")
    above, last_at = [], [-1]  # the parent of each position; the last position at each depth
    for position, depth in enumerate(ranges.column("depth")):
        above.append(last_at[depth])
        last_at[depth + 1 :] = [position]
    kept = {-1}
    for position in sorted(range(len(ranges)), key=lambda position: -(share[position] or 0)):
        new: list[int] = []
        while position not in kept and len(kept) + len(new) <= rows:
            new.append(position)
            position = above[position]
        if position in kept:
            kept.update(new)
    return sorted(kept - {-1})


def with_type(name: str, module_type: str | None) -> str:
    """Return a range's name or path with the class of its module, such as "layers.0: Linear"."""
    plain = name.removesuffix(RECOMPUTED)
    # The range of the whole model has the name of the model's class.
    own = plain.rpartition("/")[2].rpartition(".")[2]
    return name if module_type in (None, own) else f"{plain}: {module_type}{name[len(plain) :]}"


def unmarked(capture: Views) -> str:
    """Return advice on which code to mark as a range.

    Return "" in four cases: at least half of the CPU time is in ranges, no CPU time is in ranges,
    annotations were disabled, or the trace is outside of a capture folder.
    """
    row = part(capture, coverage_rows.CPU_IN_RANGES)
    if (
        capture.folder is None
        or capture.about.annotations_disabled
        or row is None
        or not row.covered_ns
        or (row.share or 0.0) >= _MARKED
    ):
        return ""
    return f"{1 - (row.share or 0.0):.0%} of the time is in no range: {range_advice(capture)}"


def recomputed(capture: Views) -> str:
    """Return a sentence on the CPU time that activation checkpointing costs; "" if it is 0."""
    parts = capture.ranges_attribution
    again = sum(part.cpu_ns for part in parts if part.kind == "recompute")
    if not again:
        return ""
    share = again / sum(parts.column("cpu_ns"))
    return (
        f"Recomputed in the backward, by activation checkpointing: {duration(again)}, "
        f"{share:.1%} of the CPU time."
    )


def shares_are_of(capture: Views) -> str:
    """Return as text the CPU time that counts as 100 % in the shares of ranges and operators."""
    whole = duration(capture.range_tree.shared_ns)
    counted = [*capture.steps.column("number")][-capture.links.counted_steps.count :]
    window = "the recording" if not counted else f"step {counted[0]}"
    if len(counted) > 1:
        window = f"steps {counted[0]}–{counted[-1]}"
    return f"{whole} on all threads in {window}"


def device(capture: Views) -> list[str]:
    """Return a line that splits the devices' time into parts, and a line on the bottleneck.

    Return no lines if there are no device events.
    """
    (row,), events, work = capture.breakdown, capture.events, capture.work
    if not len(work.event):
        return []
    waited = waits(events, work, work.start_ns.min(keepdims=True), work.end_ns.max(keepdims=True))
    spent = {name: getattr(row, name) for name in DEVICE_PARTS} | {
        name: int(ns[0]) for name, ns in waited.items()
    }
    share = {name: ns / (row.total_ns or 1) for name, ns in spent.items()}
    parts = ", ".join(f"{share[name]:.1%} {words}" for name, words in DEVICE_PARTS.items())
    most = max(_BOUND_BY, key=lambda name: share[name])
    bottleneck = _BOUND_BY[most].format(share[most])
    if share[most] < _BINDING <= share["idle_ns"]:
        bottleneck = (
            f"Idle {share['idle_ns']:.0%} of the time, without a main reason: each reason that the "
            f"trace shows explains less than {_BINDING:.0%} of the time (--steps)."
        )
    elif share[most] < _BINDING:
        bottleneck = (
            f"Device-bound: {share['compute_ns']:.0%} of the time, the device computes; no other "
            "activity takes much time."
        )
    whole = duration(row.total_ns)
    return [f"Device: {whole} from its first work to its last, {parts}.", bottleneck]


def outside_operators(capture: Views) -> str:
    """Return a line on device work that was launched in ranges, but outside of operators.

    Return "" if this work takes less than 5 % of the device time. The launch of a CUDA graph, for
    example, is often in a range but in no operator.
    """
    table = capture.operators
    whole = sum_of_known(table.column("self_device_ns"))
    in_ranges = sum_of_known(table.where(kind="range").column("self_device_ns"))
    if not whole or not in_ranges or in_ranges < 0.05 * whole:
        return ""
    return (
        f"{duration(int(in_ranges))} of {duration(int(whole))} device time was launched in ranges, "
        "but in no operator: only the table of ranges shows this time."
    )


def incomplete(capture: Views, views: Sequence[str]) -> str:
    """Return a line on what is missing from the given views; "" if nothing is missing.

    `views` holds the names of views; "ranges" and "operators" together stand for all views. The
    line leaves out missing data that `heading` or `inside_compiled` reports.
    """
    stated = {*HEADING_ROWS, *([coverage_rows.TIMED_RANGES] if "ranges" in views else [])}
    return line(capture, [name for name in rows_of(views) if name not in stated])


def inside_compiled(capture: Views) -> list[str]:
    """Return lines on the ranges and modules that were not timed.

    These are the ranges inside regions that torch.compile compiled, and the modules without a call
    in the window.
    """
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
    return lines


def _few_modules(names: Sequence[str]) -> str:
    """Return the first few modules in `names` as text.

    If a module is inside another module in `names`, only the outer module is named, with the number
    of modules inside it.
    """
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


def to_html(capture: Views) -> str:
    """Return the capture as a fragment of an HTML page: verdict, range tree, operators, views.

    If the trace cannot be read, the error message replaces the tables.
    """
    values: dict[str, Any]
    try:
        title, *lines = [*heading(capture), *device(capture)]
        values = _tables(capture)
    except InstrumentError as error:
        title, lines, values = capture.name, [str(error)], {"failed": True}
    return render(
        "report/templates/capture.html", title=title, lines=lines, views=_views(), **values
    )


def ranges_title(capture: Views, shown: Table, by: str | None = None) -> str:
    """Return the title of the range tree, or of the list of ranges if it is sorted by `by`."""
    count = len(capture.ranges)
    some = sum(path is not None for path in shown.column("path"))
    if by is not None:
        few = f", {some} of {count}, by {by}"
    else:
        few = (
            ""
            if some == count
            else f", {some} of {count}: the largest shares and the ranges around them"
        )
    return f"Ranges{few}; share = self total (with backward) / {shares_are_of(capture)}"


def operators_title(capture: Views, rows: int, count: int, by: str) -> str:
    """Return the title of the operator table, which shows the first `rows` of `count` operators."""
    of_device = "; device share = self device / all device time" if len(capture.work.event) else ""
    return (
        f"Operators, {min(rows, count)} of {count}, by {by}; share = self CPU / "
        f"{shares_are_of(capture)}{of_device}"
    )


def without_ranges(operators: Table) -> Table:
    """Return the operator table without the rows that are no operators, such as ranges."""
    return operators.where(lambda row: row.kind not in _NO_OPERATORS)


def costliest_by(operators: Table) -> str:
    """Return the column that sorts operators: self device time if recorded, else self CPU time."""
    return "self_device_ns" if any(operators.column("self_device_ns")) else "self_cpu_ns"


def _tables(capture: Views) -> dict[str, Any]:
    from instrument.report.verdict import verdict_of

    again = ["recompute_ns"] if any(capture.ranges.column("recompute_ns")) else []
    shown = outline(capture, _RANGES)
    operators = without_ranges(capture.operators)
    key = costliest_by(operators)
    return {
        "failed": False,
        "verdict": verdict_of(capture),
        "ranges": shown.select([*_RANGE_COLUMNS, *again]) if len(capture.ranges) else None,
        "ranges_title": ranges_title(capture, shown),
        "operators": leading(capture.operators, key, _OPERATORS) if len(operators) else None,
        "operators_title": operators_title(capture, _OPERATORS, len(operators), key),
        "incomplete": incomplete(capture, ("ranges", "operators")),
    }


def _views() -> list[tuple[str, str]]:
    """Return the names of the views, each with the first line of its docstring."""
    others = {"stacks()": "call paths with their self times", "events": "all events as columns"}
    views = {name: view.help for name, view in VIEWS.items()} | others
    return sorted(views.items())
