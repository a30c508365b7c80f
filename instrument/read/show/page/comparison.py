"""The section *Comparison*: what changed in a step since another run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import polars as pl

from instrument.base.errors import CaptureError
from instrument.base.units import counted, duration, durations_like, percent
from instrument.read.compare.changes import SCHEMAS
from instrument.read.compare.diff import Difference, Whole, compare
from instrument.read.compare.side import Side
from instrument.read.compare.text import (
    TIMES,
    both,
    labels,
    main_time,
    names,
    of_ranks,
    quantity,
    signed,
    spread,
    statuses,
    summary,
)
from instrument.read.show.page.parts import (
    Part,
    choice,
    column,
    columns_of,
    fact,
    facts,
    folded,
    left_out,
    section,
    table,
    text,
)
from instrument.read.views.table import Table, known_columns
from instrument.read.views.table_text import heading

# The page has a bar for each of the largest parts of the change, at most this many, and one bar for
# all other parts.
_MOST_PARTS = 10
# The maximum number of rows of a table; the limit keeps the page small.
_MOST_ROWS = 500
# At first, at most this many changed rows of a table are shown, and at most so many warnings.
_FIRST_CHANGES, _FIRST_WARNINGS = 12, 3
_TABLES = {
    "ranges": "Ranges",
    "operators": "Operators",
    "kernels": "Kernels and copies",
    "shapes": "Input shapes",
}
_TEXTS = ("range", "name", "input_shapes", "kind", "status")
_KINDS = {"status": "status"}
_SIDES = ("before_ns", "after_ns", "change_ns")


def comparison(before: Side, after: Side) -> dict[str, Any]:
    """Return the comparison of two sides, or the sentence that says why they are not compared.

    The key `sentence` says what changed; it is "" if the sides are not compared.
    """
    try:
        found = compare(before, after)
        refusal = found.refusal
    except CaptureError as error:
        refusal = str(error)
    if refusal:
        why = text(f"Not compared: {refusal}", "warning")
        made = section("Comparison", why, heading=f"Compared with {before.name}")
        return made | {"sentence": ""}
    step = found.step
    # Whole names, so that `redacted` finds them.
    sentence = summary(found, longest=sys.maxsize)
    warnings = [text(f"Warning: {each.sentence}", "warning") for each in found.unlike]
    total = {"name": f"the {found.what}", **_sums([step])}
    made = section(
        "Comparison",
        _facts(found),
        text(spread(step), "soft"),
        *warnings[:_FIRST_WARNINGS],
        folded(f"More warnings ({len(warnings) - _FIRST_WARNINGS})", warnings[_FIRST_WARNINGS:]),
        text("Where it changed", "h3"),
        text(f"The parts sum to the change of the {found.what}.", "soft"),
        choice(
            "Parts",
            {
                title: [_changes(title, [*rows, total])]
                for title, rows in (
                    ("By range and kind", _parts(step)),
                    ("By kind", _by_kind(step)),
                )
            },
        ),
        *(_ranks(found) if len(found.wholes) > 1 else ()),
        text("Details", "h3"),
        *(_table(found, name) for name in _TABLES if len(getattr(found, name))),
        _counters(found),
        heading=f"Compared with {names(found)[0]}",
    )
    return made | {"sentence": sentence}


def _facts(found: Difference) -> Part | None:
    """Return the step of both sides and its change, in one unit and with the same digits."""
    step, what = found.step, found.what
    text = durations_like(max(step.before_ns, step.after_ns))
    share = f"{percent(abs(step.change_ns) / step.before_ns)} " if step.before_ns else ""
    tone = _tone(step.change_ns)
    means = [
        f"mean of {counted(side.count, 'step')}" if what == "step" else ""
        for side in (step.before, step.after)
    ]
    boxes = [
        fact(f"The {what} before", text(step.before_ns), means[0]),
        fact(f"The {what} in this run", text(step.after_ns), means[1]),
        fact("Change", signed(step.change_ns, text), f"{share}{tone}" if tone else "no change",
             tone=tone),
    ]  # fmt: skip
    largest = next(iter(step.parts), None)
    if largest is not None and largest.change_ns:
        boxes.append(
            fact("Mostly", signed(largest.change_ns, text), f"{largest.range} · {largest.kind}",
                 tone=_tone(largest.change_ns))
        )  # fmt: skip
    return facts(boxes)


def _tone(change: float) -> str:
    return "slower" if change > 0 else "faster" if change < 0 else ""


def _parts(step: Whole) -> list[dict[str, Any]]:
    """The parts of the step that changed most, and one that sums all others: they sum to `step`."""
    most = min(len(step.parts.where("change_ns != 0")), _MOST_PARTS)
    rows = [*step.parts]
    found = [{"name": row.range, "kind": row.kind, **_sums([row])} for row in rows[:most]]
    return [*found, {"name": "(others)", **_sums(rows[most:])}] if rows[most:] else found


def _by_kind(step: Whole) -> list[dict[str, Any]]:
    of_kind: dict[str, list[Any]] = {}
    for row in step.parts:
        of_kind.setdefault(row.kind, []).append(row)
    found = [{"name": kind, **_sums(rows)} for kind, rows in of_kind.items()]
    return sorted(found, key=lambda row: -abs(row["change_ns"]))


def _sums(rows: Iterable[Any]) -> dict[str, int]:
    listed = list(rows)
    return {name: sum(getattr(row, name) for row in listed) for name in _SIDES}


def _changes(title: str, rows: list[dict[str, Any]]) -> Part:
    """Return the table of parts that sum to their last row, the step, in one unit."""
    text = durations_like(max(rows[-1]["before_ns"], rows[-1]["after_ns"]))
    columns = [
        column("name", [row["name"] for row in rows], title=title.removeprefix("By "),
               notes=[row.get("kind") for row in rows]),
        *(column(name, [row[name] for row in rows], title=name.removesuffix("_ns"), texts=text)
          for name in _SIDES[:2]),
        column("change_ns", [row["change_ns"] for row in rows], kind="change",
               texts=lambda change: signed(change, text)),
    ]  # fmt: skip
    return table(title, columns, has_filter=False)


def _ranks(found: Difference) -> list[Part | None]:
    return [
        text(f"The {found.what} of each rank", "h3"),
        table("Change of each rank", columns_of(of_ranks(found), change_ns=signed)),
    ]


def _table(found: Difference, name: str) -> Part | None:
    """Return a table of changes.

    The time that changed most has the columns before, after and change. Each other quantity that
    changed, and the calls, have one column with both sides, which is sorted by the change.
    """
    title = _TABLES[name]
    whole: Table = getattr(found, name)
    time = main_time(whole)
    largest = pl.col(f"change_{time}").abs().fill_null(0)
    frame = whole.frame.sort(largest, descending=True, maintain_order=True)
    rows = Table(frame.head(_MOST_ROWS))
    known = known_columns(rows)
    label = labels(whole) if name == "kernels" else None
    texts = {} if label is None else {"name": [*map(label, rows)]}
    docs = {each.name: each.doc for each in SCHEMAS[name]}
    columns = [
        column(
            each,
            rows.column(each),
            doc=docs.get(each),
            kind=_KINDS.get(each),
            texts=texts.get(each),
        )
        for each in _TEXTS
        if each in known
    ]
    for side in ("before", "after", "change"):
        of_side = f"{side}_{time}"
        more = {"kind": "change", "texts": signed} if side == "change" else {"texts": duration}
        columns.append(
            column(of_side, rows.column(of_side), title=side, doc=docs.get(of_side), **more)
        )
    for each in known:
        of = each.removeprefix("change_")
        if each.startswith("change_") and of != time and (of == "calls" or any(rows.column(each))):
            columns.append(_both(rows, of, docs))
    changes = rows.column(f"change_{time}")
    changed = sum(row.status != "same" or bool(change) for row, change in zip(rows, changes))
    state = ", ".join(statuses(whole)) or "the same calls on both sides"
    title = f"{title} by {TIMES[time]}"
    shown = {"shown": min(changed, _FIRST_CHANGES)} if changed else {"shown": _FIRST_CHANGES}
    return folded(
        title,
        [
            table(f"Changes: {title}", columns, has_filter=len(rows) > 5, **shown),
            left_out(len(whole) - len(rows), "smaller changes"),
        ],
        note=f"{len(whole)}; {state}",
        id=f"comparison-{name}",
        is_open=name == "ranges",
    )


def _both(rows: Table, name: str, docs: dict[str, str]) -> dict[str, Any]:
    """Return the column of a quantity with both sides."""
    change = f"change_{name}"
    pairs = zip(rows.column(f"before_{name}"), rows.column(f"after_{name}"))
    return column(
        change,
        rows.column(change),
        title=heading(change).replace("change ", ""),
        doc=f"before → after; sorted by the change, {docs.get(change, '')}",
        texts=[both(name, before, after, unknown="–") for before, after in pairs],
    )


def _counters(found: Difference) -> Part | None:
    every = [*found.counters][:_MOST_ROWS]
    differs = [row for row in every if row.before != row.after]
    rows = [*differs, *(row for row in every if row.before == row.after)]
    docs = {each.name: each.doc for each in SCHEMAS["counters"]}

    def values(name: str) -> list[Any]:
        return [getattr(row, name) for row in rows]

    def side(name: str, text_of: Callable[[str, Any], str]) -> dict[str, Any]:
        cells = [(row.counter, getattr(row, name)) for row in rows]
        texts = ["–" if value is None else text_of(counter, value) for counter, value in cells]
        return column(name, values(name), doc=docs.get(name), texts=texts)

    ranges = [each if each is not None else f"(whole {found.what})" for each in values("range")]
    columns = [
        column("counter", values("counter"), doc=docs.get("counter")),
        column("range", ranges, doc=docs.get("range")),
        side("before", quantity),
        side("after", quantity),
        side("change", _signed_quantity),
    ]
    return folded(
        "Counters",
        [
            table("Changes: counters", columns, has_filter=len(rows) > 5,
                  **({"shown": len(differs)} if differs else {})),
            left_out(len(found.counters) - len(every), "rows"),
        ],
        note=f"{len(rows)}; {len(differs)} differ",
        id="comparison-counters",
    )  # fmt: skip


def _signed_quantity(name: str, change: float) -> str:
    return signed(change, lambda each: quantity(name, each))
