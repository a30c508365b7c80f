"""The section *Verdict*: how long a step takes, how this time splits, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import mean
from typing import Any

from instrument.base.errors import CaptureError
from instrument.base.units import duration, percent
from instrument.read.advise.diagnosis import Diagnosis, Term, below, terms
from instrument.read.advise.finding import Finding, labels_of
from instrument.read.advise.verdict import nothing_found, saved
from instrument.read.facts.segments import KINDS, step_parts
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
from instrument.read.simulate.scenario import scenario
from instrument.read.views.coverage import incomplete
from instrument.read.views.table import Table
from instrument.read.views.views import Views

# The bar by range has parts for at most this many ranges, and one part for all other ranges.
_MOST_RANGES = 9
_OTHERS = "(others)"
# The number of findings at the top. The others are folded.
_FIRST_FINDINGS = 3


def verdict(capture: Views, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what a step takes, how its time splits, the findings, and what was not recorded.

    The numbers are those of the steps that count. Without finished steps, the whole recording
    counts as one step.
    """
    span = capture.links.counted_steps
    lasts_ns = (span.end_ns - span.start_ns).tolist()
    parts = step_parts(capture)
    cards = [_card(each, capture, diagnosis, not at) for at, each in enumerate(diagnosis.findings)]
    first, others = cards[:_FIRST_FINDINGS], cards[_FIRST_FINDINGS:]
    known = sum(finding.saving is not None for finding in diagnosis.findings)
    passed, not_checked, notes = diagnosis.passed, diagnosis.not_checked, listed(diagnosis.notes)
    return section(
        "Verdict",
        facts(_facts(capture, diagnosis, parts)),
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
        *_where_it_goes(capture, lasts_ns, parts),
        folded(f"Passed, or costs too little to matter ({len(passed)})", [listed(passed)]),
        folded(f"Not checked ({len(not_checked)})", [listed(not_checked)]),
        folded("Accuracy of the savings", [notes]) if cards else None,
        folded("Coverage of the recording", [_coverage(capture.coverage),
                                             text(cost(capture), "soft")]),
    )  # fmt: skip


def _facts(
    capture: Views, diagnosis: Diagnosis, parts: dict[tuple[str, str], int]
) -> Iterator[dict[str, Any]]:
    steps, total_ns = capture.steps, capture.links.counted_steps.total_ns
    where = f" in {capture.name}" if len(diagnosis.captures) > 1 else ""
    numbers, duration_ns = steps.column("number"), steps.column("duration_ns")
    yield _step_time(capture, diagnosis)
    every, kept = [*capture.efficiency_steps], capture.links.counted_steps.kept
    rates = [row for row in every[kept] if row.mfu is not None]
    if rates:
        is_bound = any((row.flops_covered or 0.0) < 1 for row in rates)
        whole = "at least: FLOPs are not known for all kernels" if is_bound else "of the peak"
        yield fact("MFU", percent(mean(row.mfu for row in rates)), f"{whole}{where}")
    if len(capture.work.event) and total_ns:
        busy_ns = sum(ns for (_, kind), ns in parts.items() if kind in KINDS[:3])
        whole = "of the step" if numbers else "of the recording"
        yield fact("Device busy", percent(busy_ns / total_ns), f"{whole}{where}")
    if lost := [*incomplete(capture)]:
        more = f", and {len(lost) - 1} more" if lost[1:] else ""
        yield fact(
            "Not all was recorded",
            "unknown" if lost[0].share is None else percent(lost[0].share),
            f"{lost[0].name}{more}: see Coverage of the recording, below",
        )
    if len(numbers) > 1:
        between = f"steps {numbers[0]}–{numbers[-1]}{where}"
        yield fact("Each step", "", between, chart=step_chart(numbers, duration_ns))


def _step_time(capture: Views, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return how long a step takes, as the sentence above says it, and how this varies."""
    span = capture.links.counted_steps
    on_cpu_ns = lasts_ns = (span.end_ns - span.start_ns).tolist()
    with suppress(CaptureError):  # without a simulation, the sentence above does not say it
        lasts_ns = scenario(capture).counted_steps
    own_ns = sum(lasts_ns) // len(lasts_ns)
    note = "one step counts" if len(capture.steps) else "no finished steps"
    if len(lasts_ns) > 1:
        ends = "" if lasts_ns == on_cpu_ns else ", each until its device work ends"
        note = (
            f"mean of {len(lasts_ns)} steps ({_which(capture)}){ends}; between "
            f"{duration(min(lasts_ns))} and {duration(max(lasts_ns))}"
        )
    if (count := len(diagnosis.captures)) > 1:
        note = f"median of {count} captures; in this one, {duration(own_ns)}: {note}"
    step = "A step" if diagnosis.has_steps else "The recording"
    return fact(f"{step} takes", duration(diagnosis.step_ns or own_ns), note)


def _which(capture: Views) -> str:
    """Return which steps count, for a sentence."""
    numbers, kept = capture.steps.column("number"), capture.links.counted_steps.kept
    counted = numbers[kept]
    is_rest = len(counted) == len(numbers) - 1
    return "all steps but the first" if is_rest else f"steps {counted[0]}–{counted[-1]}"


def _where_it_goes(
    capture: Views, lasts_ns: Sequence[int], parts: dict[tuple[str, str], int]
) -> Iterator[Part | None]:
    count, total_ns = len(lasts_ns), sum(lasts_ns)
    what = f"{count} steps" if count > 1 else "the step" if len(capture.steps) else "the recording"
    yield text(f"Where the time of {what} goes", "h3")
    if count > 1:
        yield text(
            f"The times are sums over {_which(capture)}. These {count} steps take "
            f"{duration(total_ns)} together.",
            "soft",
        )
    if not len(capture.work.event):
        yield text(
            "Idle is time in which the trace shows nothing, for example because Python code runs "
            "outside of all ranges.",
            "soft",
        )
    kinds = dict.fromkeys(KINDS, 0)
    ranges: dict[str, int] = {}
    for (path, kind), ns in parts.items():
        kinds[kind] += ns
        ranges[path] = ranges.get(path, 0) + ns
    largest = sorted(ranges.items(), key=lambda item: -item[1])
    if others := largest[_MOST_RANGES:]:
        largest = [*largest[:_MOST_RANGES], (_OTHERS, sum(ns for _, ns in others))]
    halves = {"what happens": _bar([*kinds.items()], total_ns)}
    if len(ranges) > 1:
        halves["range"] = _bar(largest, total_ns, is_range=True)
    yield {
        "kind": "bars",
        "items": [
            {
                "title": f"By {by}",
                "label": f"The time of {what} by {by}; the numbers are below",
                "parts": bar,
            }
            for by, bar in halves.items()
        ],
    }


def _bar(
    pairs: Sequence[tuple[str, int]], total_ns: int, *, is_range: bool = False
) -> list[dict[str, Any]]:
    return [
        {"name": name, "ns": ns, "text": duration(ns), "share": percent(ns / total_ns),
         "is_range": is_range}
        for name, ns in pairs
        if ns
    ]  # fmt: skip


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
    rows = [(each.label.title(), each.text, _style(each)) for each in terms(finding, diagnosis)]
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
        "terms": [{"term": term, "text": words, "style": style} for term, words, style in rows],
        "evidence": _evidence(finding, capture) if finding.evidence else None,
    }


def _style(term: Term) -> str:
    return "code" if term.is_code and term.label != "where" else ""


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
