"""The section *Verdict*: how long a step takes, how this time splits, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from instrument.base.units import counted, duration, percent
from instrument.read.advise.diagnosis import Diagnosis, below, terms
from instrument.read.advise.finding import Finding, labels_of
from instrument.read.advise.verdict import LINES, nothing_found, saved
from instrument.read.show.page.parts import (
    Part,
    column,
    columns_of,
    fact,
    facts,
    folded,
    listed,
    section,
    step_chart,
    table,
    text,
)
from instrument.read.show.remarks import cost
from instrument.read.show.summary import Summary, summary
from instrument.read.views.coverage import incomplete
from instrument.read.views.phases import steps_in_words
from instrument.read.views.table import Table
from instrument.read.views.views import Views

# The bar by range has parts for at most this many ranges, and one part for all other ranges.
_MOST_RANGES = 9
# The number of findings at the top. The others are folded.
_FIRST_FINDINGS = 3


def verdict(capture: Views, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what a step takes, how its time splits, the findings, and what was not recorded."""
    found = summary(capture)
    cards = [_card(each, capture, diagnosis, not at) for at, each in enumerate(diagnosis.findings)]
    first, others = cards[:_FIRST_FINDINGS], cards[_FIRST_FINDINGS:]
    known = sum(finding.saving is not None for finding in diagnosis.findings)
    passed, not_checked, notes = diagnosis.passed, diagnosis.not_checked, listed(diagnosis.notes)
    lost = len(incomplete(capture))
    return section(
        "Verdict",
        facts(_facts(capture, found, diagnosis)),
        text(LINES, "soft") if diagnosis.lines else None,
        listed(diagnosis.lines),
        text("What to change", "h3"),
        None if cards else text(f"{nothing_found(diagnosis)}."),
        text(
            "Findings may count the same time. So the savings do not add up: each is that of one "
            "change alone.",
            "soft",
        )
        if known > 1
        else None,
        *first,
        *map(text, below(diagnosis)),
        # Without findings, the notes on the simulation are not folded.
        None if cards else notes,
        folded(f"More findings ({len(others)})", others),
        *_where_it_goes(found),
        folded(f"Passed, or costs too little to matter ({len(passed)})", [listed(passed)]),
        folded(f"Not checked ({len(not_checked)})", [listed(not_checked)]),
        folded("Accuracy of the savings", [notes]) if cards else None,
        folded(
            "Coverage of the recording",
            [_coverage(capture.coverage), text(cost(capture), "soft")],
            note=f"{counted(lost, 'row')} below 95 %" if lost else "",
        ),
    )


def _facts(capture: Views, found: Summary, diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    where = f" in {capture.name}" if len(diagnosis.captures) > 1 else ""
    lasts = [*map(duration, (found.step_ns, min(found.steps_ns), max(found.steps_ns)))]
    note = "one step counts" if found.has_steps else steps_in_words(capture) or "no finished steps"
    if (count := len(found.steps_ns)) > 1:
        note = f"mean of {count} steps ({_which(found)}); between {lasts[1]} and {lasts[2]}"
    if len(diagnosis.captures) > 1:
        note = f"median of {len(diagnosis.captures)} captures; in this one, {lasts[0]}: {note}"
    step = "A step" if diagnosis.has_steps else "The recording"
    yield fact(f"{step} takes", duration(diagnosis.step_ns or found.step_ns), note)
    every, kept = [*capture.efficiency_steps], capture.links.counted_steps.kept
    rates = [row for row in every[kept] if row.mfu is not None]
    if rates:
        is_bound = any((row.flops_covered or 0.0) < 1 for row in rates)
        whole = "at least: FLOPs are not known for all kernels" if is_bound else "of the peak"
        yield fact("MFU", percent(mean(row.mfu for row in rates)), f"{whole}{where}")
    if found.idle is not None:
        whole = "of the step" if found.has_steps else "from its first to its last work"
        yield fact("Device idle", percent(found.idle), f"{whole}{where}")
    numbers, lasts_ns = capture.steps.column("number"), capture.steps.column("duration_ns")
    if len(numbers) > 1:
        between = f"steps {numbers[0]}–{numbers[-1]}{where}, on the CPU"
        yield fact("Each step", "", between, chart=step_chart(numbers, lasts_ns))


def _which(found: Summary) -> str:
    first, *_, last = found.numbers
    return f"steps {first}–{last}"


def _where_it_goes(found: Summary) -> Iterator[Part | None]:
    step = "a step" if found.has_steps else "the recording"
    yield text(f"Where the time of {step} goes", "h3")
    if len(found.steps_ns) > 1:
        yield text(f"The times are means of {_which(found)}.", "soft")
    if found.idle is None:
        yield text(
            "Idle is time in which the trace shows nothing, for example because Python code runs "
            "outside of all ranges.",
            "soft",
        )
    by_time = sorted(found.ranges.items(), key=lambda item: -item[1])
    ranges = dict(by_time[:_MOST_RANGES])
    if others := by_time[_MOST_RANGES:]:
        ranges["(others)"] = sum(ns for _, ns in others)
    halves = {"what happens": found.kinds}
    if len(ranges) > 1:
        halves["range"] = ranges
    yield {
        "kind": "bars",
        "items": [
            {
                "title": f"By {by}",
                "label": f"The time of {step} by {by}; the numbers are below",
                "parts": [
                    {"name": name, "ns": round(ns), "text": duration(ns),
                     "share": percent(found.share(ns)), "is_range": by == "range"}
                    for name, ns in parts.items()
                    if round(ns)
                ],
            }
            for by, parts in halves.items()
        ],
    }  # fmt: skip


def _coverage(coverage: Table) -> Part:
    shown = coverage.select(["name", "share", "why"])
    columns = columns_of(shown, why=str)
    titles = ("what the recording shows", "share", "what is missing")
    for each, title in zip(columns, titles):
        each["title"] = title
    columns[2] |= {"kind": "sentence", "texts": [why or "" for why in shown.column("why")]}
    return table("Coverage", columns, has_filter=False)


def _card(finding: Finding, capture: Views, diagnosis: Diagnosis, is_open: bool) -> Part:
    """Return a finding with its terms, its gauge and its evidence."""
    saving, saves = finding.saving, "ends the run" if finding.ends_run else "saving unknown"
    if finding.is_caveat:
        saves = ""
    if saving is not None:
        saves = f"saves {saved(saving)}"
    rows = terms(finding, diagnosis)
    if saving is None and not finding.is_caveat:
        del rows[0]
    return {
        "kind": "finding",
        "code": finding.code,
        "title": finding.title,
        "share": None if saving is None else saving.share,
        "saves": saves,
        "assumes": finding.assumes,
        "ends_run": finding.ends_run,
        "is_open": is_open,
        "terms": [
            {
                "term": each.label.title(),
                "text": each.text,
                "style": "code" if each.is_code and each.label != "where" else "",
            }
            for each in rows
        ],
        "evidence": _evidence(finding, capture) if finding.evidence else None,
    }


def _evidence(finding: Finding, capture: Views) -> Part:
    """Return the table of evidence, with links to the longest event of each row, if it is known."""
    rows, begin_ns = finding.evidence, capture.events.begin_ns
    links = [
        span and f"#timeline?from={span[0] - begin_ns}&to={span[1] - begin_ns}"
        for span in finding.spans_in(capture.name)
    ]
    details = [row.detail for row in rows]
    columns = [
        column("name", [row.name for row in rows], title="evidence", kind="link", links=links,
               texts=labels_of(rows)),
        column("calls", [row.calls for row in rows], title="calls in total",
               texts=lambda calls: f"{calls:,}"),
        column("total_ns", [row.total_ns for row in rows], title="time in total"),
        column("detail", details, kind="sentence", texts=[detail or "" for detail in details]),
    ]  # fmt: skip
    return table(f"Evidence: {finding.title}", columns)
