"""A `Difference` as text and as Markdown.

The parts and the step are shown with equally many decimals. Parts are rounded up or down, so that
the rounded parts sum to the rounded step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from instrument.base.prose import (
    NAMES_ARE_DATA,
    PROSE_WIDTH,
    byte_count,
    code,
    escaped,
    shortened,
    wrapped,
)
from instrument.base.units import (
    MINUS,
    counted,
    duration,
    durations_like,
    few,
    last_digit,
    percent_change,
)
from instrument.read.compare.changes import divided
from instrument.read.compare.unlike import Unlike
from instrument.read.facts.kernel_names import kernel_labels
from instrument.read.facts.schema import unit_of
from instrument.read.views.section import Part, Section, shown_of
from instrument.read.views.table import Table
from instrument.read.views.table_text import cell_text

if TYPE_CHECKING:
    from instrument.read.compare.diff import Difference, Steps, Whole

By = Literal["range", "operator", "kernel", "shape"]

_TABLES: Mapping[By, str] = {
    "range": "ranges",
    "operator": "operators",
    "kernel": "kernels",
    "shape": "shapes",
}
_NAME_OF: Mapping[By, str] = {
    "range": "{0.range}",
    "operator": "{0.name}",
    "shape": "{0.name} {0.input_shapes}",
}
# The first sentence names at most `_MOST_NAMED` kinds of time. It names a kind if the change of the
# kind is at least the fraction `_NAMED` of the largest change of a kind.
_NAMED, _MOST_NAMED = 0.3, 2
# The sentence also names a range if at least this fraction of the kind's change is in the range.
_MOSTLY = 0.5
# The longest name in a sentence and in Markdown.
_LONGEST_NAME = 60
_BOTH = ("before", "after")
_SIDES = ("before_ns", "after_ns", "change_ns")
_INTERVAL = ("low_ns", "high_ns")
# The least width of names in a table.
_NARROWEST = 16
_MARKDOWN_BYTES, _MARKDOWN_ROWS = 6_000, 15
# The text for a table without rows.
_NOT_RECORDED: Mapping[By, str] = {
    "range": "there are none; mark code with @profiled",
    "operator": "there are none",
    "kernel": "there is no device work",
    "shape": "one side has no input shapes; profiler.record_shapes=true records them",
}
_LONGEST_WARNING, _MOST_WARNINGS = 300, 6
#: The time that a table shows, in words, by the name of the quantity.
TIMES = {
    "step_ns": "time of the step",
    "device_ns": "device time",
    "self_device_ns": "device time",
    "self_cpu_ns": "CPU time",
}


def parts(found: Difference, *, rows: int = 15, by: By | None = None) -> list[Part]:
    """Return a comparison as paragraphs and tables.

    The first paragraph says what changed. Warnings and a sentence on the spread of the steps
    follow. The first table splits the time of a step into parts.

    Args:
        found: the comparison.
        rows: the maximum number of rows in each table.
        by: the only table to show below the parts of the step. None shows the operators, the
            kernels and the counters (numbers per step that do not depend on speed).
    """
    has_kernels = len(found.kernels) > 0
    usual: tuple[By, ...] = ("operator", "kernel") if has_kernels else ("operator",)
    made: list[Part] = [wrapped(summary(found), indent="  ")]
    if found.unlike:
        warnings = [f"Warning: {each.sentence}" for each in found.unlike]
        made.append([line for each in warnings for line in wrapped(each, indent="  ")])
    made.append(wrapped(spread(found.step), indent="  "))
    title = f"Parts of the {found.quantity}{shown_of(rows, len(found.step.parts))}"
    made.append(_section(found, _rounded(found.step, rows), title, missable=("before_ns",)))
    if len(found.wholes) > 1:
        made.append(_section(found, of_ranks(found), "Ranks"))
    made += [part for each in ((by,) if by else usual) for part in _changed(found, each, rows)]
    if not by:
        made.append(_counters(found, rows))
    return made


def summary(found: Difference, *, longest: int = _LONGEST_NAME) -> str:
    """Return what changed, in one sentence, with names of at most `longest` characters.

    For example: "a → b: mean step 118.3 ms → 94.2 ms (−24.1 ms, −20.4 %), mostly: idle −20.0 ms".
    """
    step = found.step
    text = durations_like(max(step.before_ns, step.after_ns))
    was, now = (_round(ns, _unit(step)) for ns in (step.before_ns, step.after_ns))
    change = signed(now - was, text)
    share = f", {percent_change(step.change_ns / step.before_ns)}" if step.before_ns else ""
    causes = [
        f"{kind}{f' in {shortened(path, longest)}' if path else ''} {signed(change_ns, text)}"
        for kind, path, change_ns in _causes(step)
    ]
    mostly = f", mostly: {', '.join(causes)}" if causes else ""
    sides = " → ".join(shortened(name, longest) for name in names(found))
    return f"{sides}: {found.quantity} {text(was)} → {text(now)} ({change}{share}){mostly}"


def names(found: Difference) -> tuple[str, str]:
    """Return the names of the two sides.

    The name of a side is the name of its capture. If both captures have the same name, or if a
    side has several captures, the names are the arguments that the user gave.
    """
    if len(found.before) == len(found.after) == 1 and found.before != found.after:
        return found.before[0], found.after[0]
    return found.given


def _causes(step: Whole) -> Iterator[tuple[str, str | None, int]]:
    """Yield a tuple (kind, range, change in ns) for the kinds of time that changed most.

    If at least half of a kind's change is in one range, the tuple has this range, and the change in
    this range. Otherwise the range is None, and the change is that of the whole kind.
    """
    of_kind: dict[str, int] = {}
    for row in step.parts:
        of_kind[row.kind] = of_kind.get(row.kind, 0) + row.change_ns
    order = sorted(of_kind, key=lambda kind: -abs(of_kind[kind]))
    for kind in order[:_MOST_NAMED]:
        change_ns = of_kind[kind]
        if not change_ns or abs(change_ns) < _NAMED * abs(of_kind[order[0]]):
            return
        first = next(row for row in step.parts if row.kind == kind)
        is_most = first.change_ns / change_ns >= _MOSTLY and not first.range.startswith("(")
        yield (kind, first.range, first.change_ns) if is_most else (kind, None, change_ns)


def spread(step: Whole) -> str:
    """Return sentences on how sure the change is: its interval, or how much the steps vary."""
    one, other = step.before, step.after
    text = durations_like(max(one.median_ns, other.median_ns))
    if step.low_ns is not None and step.high_ns is not None:
        was, now = step.samples
        return (
            f"From {was} captures before and {now} after, the change is from "
            f"{signed(step.low_ns, text)} to {signed(step.high_ns, text)} (90 % interval). A "
            "change whose interval holds 0 may be due to chance."
        )
    more = "" if step.samples == (1, 1) else " An interval needs three captures on each side."
    medians = f"Median step: {_around(one, text)} → {_around(other, text)}. "
    if one.deviation_ns is None or other.deviation_ns is None:
        # of one or two steps, the median is the mean
        return (medians if max(one.count, other.count) > 2 else "") + (
            "The spread of the steps is not known, because a side has fewer than three steps: the "
            f"change may be due to chance.{more}"
        )
    change_ns = other.median_ns - one.median_ns
    where = "at most" if abs(change_ns) <= one.deviation_ns + other.deviation_ns else "more than"
    return (
        f"{medians}The medians differ by {where} the sum of both ± values. A ± value is the median "
        f"distance of one side's steps from the median step of this side.{more}"
    )


def _around(steps: Steps, text: Any) -> str:
    around = "" if steps.deviation_ns is None else f" ± {text(steps.deviation_ns)}"
    return f"{text(steps.median_ns)}{around} ({counted(steps.count, 'step')})"


def _section(found: Difference, table: Table, title: str, **more: Any) -> Section:
    return Section(
        table,
        table.columns,
        title,
        text_width=PROSE_WIDTH,
        narrowest=_NARROWEST,
        texts=_texts(found),
        all_columns="--json",
        **more,
    )


def _rounded(step: Whole, rows: int) -> Table:
    """Return a table of the parts of a step, with rounded times in ns.

    - The first `rows` rows are the parts that changed most.
    - The next row, if there are other parts, sums these other parts.
    - The last row is the whole step. Its rounded time is the sum of the rounded times above it.
    """
    unit, ends = _unit(step), _INTERVAL if step.low_ns is not None else ()
    frame = step.parts.frame.select("range", "kind", *_SIDES[:2], *ends)
    others, text = frame[rows:], pl.lit("").alias("kind")
    name = f"({counted(len(others), 'smaller part')})"
    sums = others.select(pl.lit(name).alias("range"), text, pl.sum(*_SIDES[:2])).head(len(others))
    frame = pl.concat([frame[:rows], sums], how="diagonal")
    whole = {end: getattr(step, end) for end in ends}
    for side in _SIDES[:2]:
        values = frame[side].to_list()
        whole[side] = _round(sum(values), unit)
        cells = [each * unit for each in divided(values, unit, whole[side] // unit)]
        frame = frame.with_columns(pl.Series(side, cells, dtype=pl.Int64))
    last = pl.DataFrame({"range": "(all)", "kind": "", **whole})
    change = (pl.col("after_ns") - pl.col("before_ns")).alias("change_ns")
    return Table(
        pl.concat([frame, last], how="diagonal_relaxed").select(
            "range", "kind", *_SIDES[:2], change, *ends
        )
    )


def _unit(step: Whole) -> int:
    """Return the unit to which the times are rounded: the last digit that the text shows."""
    return last_digit(max(step.before_ns, step.after_ns))


def _round(ns: int, unit: int) -> int:
    return (2 * ns + unit) // (2 * unit) * unit


def _texts(found: Difference) -> dict[str, Any]:
    text = durations_like(max(found.step.before_ns, found.step.after_ns))
    change = dict.fromkeys(("change_ns", *_INTERVAL), lambda ns: signed(ns, text))
    return {"before_ns": text, "after_ns": text, **change}


def signed(change: float, text: Callable[[Any], str] = duration) -> str:
    """A change as text with its sign; a change that is rounded to 0 has no sign."""
    shown = text(abs(change))
    is_nothing = not any(digit in shown for digit in "123456789")
    return shown if is_nothing else f"{MINUS if change < 0 else '+'}{shown}"


def of_ranks(found: Difference) -> Table:
    """Return a row for each rank, with its mean step on both sides and the change of the step.

    The cell `largest` names the part of the step that changed most.
    """
    wholes = found.wholes[1:]
    largest = [whole.parts[0] if any(whole.parts.column("change_ns")) else None for whole in wholes]
    return Table(
        {
            "rank": [whole.rank for whole in wholes],
            "before_ns": [whole.before_ns for whole in wholes],
            "after_ns": [whole.after_ns for whole in wholes],
            "change_ns": [whole.change_ns for whole in wholes],
            "largest": [f"{row.kind} in {row.range}" if row else None for row in largest],
        }
    )


def _changed(found: Difference, by: By, rows: int) -> Iterator[Part]:
    """Yield the table that `by` names: the rows whose time changed, the largest change first.

    A line follows on rows that the table leaves out although their number of calls changed.
    """
    table = getattr(found, _TABLES[by])
    if not len(table):
        yield f"{_TABLES[by].capitalize()}: {_NOT_RECORDED[by]}."
        return
    title, time = _TABLES[by].capitalize(), main_time(table)
    of = f"; {', '.join(statuses(table)) or 'the same calls on both sides'}"
    change = pl.col(f"change_{time}").abs().fill_null(0)
    changed = table.frame.filter(change >= _unit(found.step))
    shown = Table(changed.sort(change, descending=True, maintain_order=True).head(rows))
    label = labels(table) if by == "kernel" else _NAME_OF[by].format
    ends = ("low", "high") if found.step.low_ns is not None else ()
    columns = {
        "name": [*map(label, shown)],
        "status": shown.column("status"),
        "calls": [both("calls", row.before_calls, row.after_calls) for row in shown],
        **{f"{side}_ns": shown.column(f"{side}_{time}")
           for side in ("before", "after", "change", *ends)},
    }  # fmt: skip
    if len(shown):
        title = f"{title} by {TIMES[time]}{shown_of(len(shown), len(changed))}{of}"
        yield _section(found, Table(columns), title, missable=("calls", "status"))
    else:
        yield f"{title}: no time changed{of}."
    others = [row for row in table if row.status != "same" and label(row) not in columns["name"]]
    if others:
        texts = (
            f"{shortened(label(row), _LONGEST_NAME)} "
            f"{both('calls', row.before_calls, row.after_calls)}"
            for row in others
        )
        yield wrapped(f"Not shown, with another number of calls: {few(texts)}.", indent="  ")


def statuses(table: Table) -> list[str]:
    """Return a text such as "2 added" for each status that rows have, except for "same"."""
    numbers = dict(table.frame["status"].value_counts().iter_rows())
    every = ("added", "removed", "changed")
    return [f"{numbers[status]} {status}" for status in every if status in numbers]


def main_time(table: Table) -> str:
    """Return the name of the time that a report shows for a table, such as "self_cpu_ns".

    For the table of ranges, this is "step_ns". For other tables, it is the time with the largest
    sum of absolute changes over all rows.
    """
    if "change_step_ns" in table.columns:
        return "step_ns"
    times = [name for name in TIMES if f"change_{name}" in table.columns]
    return max(times, key=lambda name: table.frame[f"change_{name}"].abs().sum())


def labels(kernels: Table) -> Callable[[Any], str]:
    """Return the function that gives the short name of a kernel's row, each different."""
    exact = [row.name for row in kernels if row.name in (row.before_full_name, row.after_full_name)]
    found = kernel_labels(exact)
    return lambda row: found.get(row.name, f"{row.name} (by label)")


def _counters(found: Difference, rows: int) -> str | Section:
    """Return the counters that differ: first the counters of the step, then those of ranges."""
    rows_of_ranges = found.counters.frame.sort(pl.col("range").is_not_null(), maintain_order=True)
    texts = [
        (row["counter"], row["range"], *(quantity(row["counter"], row[side]) for side in _BOTH))
        for row in rows_of_ranges.iter_rows(named=True)
    ]
    differ = [each for each in texts if each[2] != each[3]]
    if not differ:
        return "Counters: none differs."
    shown = [*zip(*differ[:rows])]
    columns = dict(zip(("counter", "range", *_BOTH), map(list, shown)))
    title = f"Counters of a {found.what} that differ{shown_of(min(rows, len(differ)), len(differ))}"
    return _section(found, Table(columns), title)


def quantity(name: str, value: float | None, unknown: str = "-") -> str:
    """A quantity of a mean step as text; a number of calls that differs has two decimals."""
    if value is None:
        return unknown
    if unit_of(name):
        return cell_text(name, value)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def both(name: str, before: float | None, after: float | None, unknown: str = "-") -> str:
    """A quantity of both sides as text, such as "2 → 3"; one number if both look the same."""
    one, other = quantity(name, before, unknown), quantity(name, after, unknown)
    return one if one == other else f"{one} → {other}"


def as_markdown(found: Difference, *, rows: int = _MARKDOWN_ROWS) -> str:
    """Return a comparison as Markdown of at most 6,000 bytes, for a comment on a pull request.

    The table has at most 15 parts of the step, or fewer to keep within 6,000 bytes. One row sums
    the other parts.
    """
    head = [
        f"## {escaped(summary(found))}",
        f"Found by `instrument diff`. {NAMES_ARE_DATA}",
        *(f"> {escaped(sentence)}" for sentence in _sentences(found.unlike)),
        escaped(spread(found.step)),
    ]
    for number in range(min(rows, _MARKDOWN_ROWS), 0, -1):
        made = [*head, _markdown_table(found, number)]
        if byte_count(made) <= _MARKDOWN_BYTES:
            break
    return "\n\n".join(made)


def _sentences(unlike: Sequence[Unlike]) -> list[str]:
    texts = [f"Warning: {each.sentence}" for each in unlike]
    shown = [shortened(text, _LONGEST_WARNING) for text in texts[:_MOST_WARNINGS]]
    more = len(unlike) - len(shown)
    return [*shown, f"… and {more} more warnings."] if more else shown


def _markdown_table(found: Difference, rows: int) -> str:
    texts = _texts(found)
    step, lines = (
        found.step,
        ["| range | kind | before | after | change |", "|---|---|---:|---:|---:|"],
    )
    if step.low_ns is not None:
        lines = [f"{lines[0]} 90 % interval |", f"{lines[1]}---:|"]
    for row in _rounded(step, rows):
        times = [texts[name](getattr(row, name)) for name in _SIDES]
        if step.low_ns is not None:
            ends = [getattr(row, end) for end in _INTERVAL]
            times.append("" if None in ends else " to ".join(map(texts["low_ns"], ends)))
        name = code(row.range, _LONGEST_NAME).replace("|", "\\|")
        lines.append(f"| {name} | {row.kind} | {' | '.join(times)} |")
    return "\n".join(lines)
