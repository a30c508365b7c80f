"""The section *Verdict*: how long a step takes, how this time splits, and what to change."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from instrument.analysis.coverage import incomplete
from instrument.analysis.step_parts import SPLIT_KINDS, split_parts
from instrument.analysis.views import Views
from instrument.findings.diagnose import Diagnosis
from instrument.findings.diagnosis_text import finding_as_dict
from instrument.findings.finding import Finding
from instrument.report.notebook import cost, facts
from instrument.report.verdict import verdict
from instrument.units import percent

# The bar by range has parts for at most this many ranges, and one part for all other ranges.
_MOST_RANGES = 9
_OTHERS = "(others)"
# A finding has two shares of the step: the share in its title, and the share that it saves. If they
# differ by more than this, a sentence says why.
_ALIKE = 0.03


def section(capture: Views, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the verdict.

    The keys:

    - `sentence`: what slows the run most.
    - `facts`: short texts on the steps, the versions, the devices and the rank.
    - `cost`: a sentence on the cost of recording, or "".
    - `steps`: `numbers`, `start_ns` and `duration_ns` of the finished steps. Each `start_ns` counts
      from the first event of the trace.
    - `spread`: `median_ns`, `min_ns` and `max_ns` of all steps but the first.
    - `parts`: how the time of all steps but the first splits. `steps` is the number of these steps,
      and `total_ns` their time. `by_kind` and `by_range` are lists of `name` and `ns`; each list
      sums to `total_ns` exactly. The kinds are those of
      `instrument.analysis.step_parts.split_parts`.
    - `device_share`: the share of `total_ns` in which a device works; None without device work.
    - `mfu`: the mean model FLOPs utilization, or None. `mfu_is_bound`: whether it is a lower bound.
    - `coverage`: the rows of `capture.coverage`: `name`, `share`, `why`, and `is_incomplete`:
      whether the row reports a loss of data that affects the tables.
    - `step_ns`: the duration of the simulated step, or None.
    - `findings`: the findings of `instrument diagnose --json`, with additional keys:
      - `baseline_ns`: the duration of the step without the change that saves `saving_ns`.
      - `difference`: a sentence; see `_difference`.
      - `start_ns` and `end_ns` of each item of `evidence`: the start and end of its longest event,
        counted from the first event of the trace. Both are None if this event is unknown or in
        another capture.
    - `passed`, `not_checked`, `notes`: sentences.

    If there is only one step, `spread` and `parts` describe this step. Without finished steps, the
    whole recording counts as one step.
    """
    begin_ns, steps = capture.events.begin_ns, capture.steps
    return {
        "sentence": verdict(diagnosis),
        "facts": facts(capture),
        "cost": cost(capture),
        "steps": {
            "numbers": steps.column("number"),
            "start_ns": [ns - begin_ns for ns in steps.column("start_ns")],
            "duration_ns": steps.column("duration_ns"),
        },
        **_where_it_goes(capture),
        **_utilization(capture),
        "coverage": _coverage(capture),
        "step_ns": diagnosis.step_ns,
        "findings": [_finding(finding, capture) for finding in diagnosis.findings],
        "passed": diagnosis.passed,
        "not_checked": diagnosis.not_checked,
        "notes": diagnosis.notes,
    }


def _where_it_goes(capture: Views) -> dict[str, Any]:
    span = capture.links.counted_steps
    lasts_ns = (span.end_ns - span.start_ns).tolist()
    kinds = dict.fromkeys(SPLIT_KINDS, 0)
    ranges: dict[str, int] = {}
    for (path, kind), ns in split_parts(capture, span).items():
        kinds[kind] += ns
        ranges[path] = ranges.get(path, 0) + ns
    largest = sorted(ranges.items(), key=lambda item: -item[1])
    if others := largest[_MOST_RANGES:]:
        largest = [*largest[:_MOST_RANGES], (_OTHERS, sum(ns for _, ns in others))]
    has_device = len(capture.work.event) > 0
    busy_ns = sum(kinds[name] for name in SPLIT_KINDS[:3])
    total_ns = sum(lasts_ns)
    return {
        "spread": {
            "median_ns": int(median(lasts_ns)),
            "min_ns": min(lasts_ns),
            "max_ns": max(lasts_ns),
        },
        "parts": {
            "steps": len(lasts_ns),
            "total_ns": total_ns,
            "by_kind": _parts(list(kinds.items())),
            "by_range": _parts(largest),
        },
        "device_share": busy_ns / total_ns if has_device and total_ns else None,
    }


def _coverage(capture: Views) -> list[dict[str, Any]]:
    lost = incomplete(capture).column("name")
    return [
        {"name": row.name, "share": row.share, "why": row.why, "is_incomplete": row.name in lost}
        for row in capture.coverage
    ]


def _parts(pairs: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"name": name, "ns": ns} for name, ns in pairs if ns]


def _utilization(capture: Views) -> dict[str, Any]:
    steps = capture.efficiency.steps
    known = [row for row in steps if row.mfu is not None]
    return {
        "mfu": mean(row.mfu for row in known) if known else None,
        "mfu_is_bound": any((row.flops_covered or 0.0) < 1 for row in known),
    }


def _finding(finding: Finding, capture: Views) -> dict[str, Any]:
    found, saving = finding_as_dict(finding), finding.saving
    for row, span in zip(found["evidence"], finding.spans_in(capture.name)):
        row["start_ns"], row["end_ns"] = (
            (None, None) if span is None else (ns - capture.events.begin_ns for ns in span)
        )
    return found | {
        "baseline_ns": None if saving is None else round(saving.baseline_ns),
        "difference": _difference(finding),
    }


def _difference(finding: Finding) -> str:
    """Return why the share in a finding's title differs from the share that the finding saves.

    Return "" if both shares are similar, or if one of them is not known.
    """
    share, saving = finding.share, finding.saving
    if share is None or saving is None or not saving.baseline_ns:
        return ""
    saved = saving.saving_ns / saving.baseline_ns
    if abs(saved - share) <= _ALIKE:
        return ""
    why = (
        "other work hides a part of this time, or the change removes only a part"
        if saved < share
        else "the change also shortens other time in the step"
    )
    return (
        f"The title counts the time spent ({percent(share)} of the step); the saving is how much "
        f"shorter a simulated step is ({percent(saved)}): {why}."
    )
