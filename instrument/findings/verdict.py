"""The verdict: how long a step takes, what slows it most, what the change saves, and where it is.

The log, `instrument show`, `instrument diagnose`, the report page and a notebook begin with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.prose import shortened, wrapped
from instrument.base.units import duration, percent
from instrument.findings.finding import Finding
from instrument.whatif.scenario import MOST_UNEXPLAINED

if TYPE_CHECKING:
    from instrument.findings.diagnosis import Diagnosis

#: A finding that saves a smaller share of a step is in the diagnosis, but not in the verdict.
LEAST_SHARE = 0.03
# If the share in a finding's title and the share that it saves differ by more than this, the saving
# says why.
_ALIKE = 0.03
_LONGEST_PHASE = 44
# How many findings stand below the verdict where tables follow.
_FIRST_FINDINGS = 3


def verdict(diagnosis: Diagnosis) -> str:
    """Return how long a step takes, and the largest finding: the cause, its place, the saving.

    A finding counts if it saves at least 3 % of a step, or if its saving is not known. If no
    finding counts, a sentence says so. If the saving of the largest finding is not known, the
    largest one with a known saving follows. A caveat is never the cause; see `notes`. Titles may
    hold names from a trace: escape the result for the place where it is shown.
    """
    step_ns = diagnosis.step_ns
    step = "" if step_ns is None else f"A step takes {duration(step_ns)}. "
    found = causes(diagnosis)
    if not found:
        return f"{step}{nothing_found(diagnosis)}."
    first, *others = found
    known = [each for each in others if each.saving is not None and first.saving is None][:1]
    return step + " Also: ".join(_cause(each, step_ns) for each in (first, *known))


def causes(diagnosis: Diagnosis) -> list[Finding]:
    """Return the findings that count; the verdict names the first of them."""
    return [each for each in diagnosis.findings if not each.is_caveat and _counts(each)]


def notes(diagnosis: Diagnosis) -> list[str]:
    """Return a sentence for each caveat, such as a busy machine."""
    return [f"Note: {each.title}." for each in diagnosis.findings if each.is_caveat]


def nothing_found(diagnosis: Diagnosis) -> str:
    """Return the sentence for a diagnosis without findings. The sentence has no full stop.

    If device work often began late for an unknown reason, the sentence says so, because the checks
    cannot explain these delays.
    """
    if diagnosis.step_ns is None:
        return "Nothing found; the savings are not known, because no step could be simulated"
    saves = f"that saves more than {LEAST_SHARE * 100:.0f} % of a step"
    late = diagnosis.unexplained or 0.0
    if late <= MOST_UNEXPLAINED:
        return f"Nothing found {saves}"
    return (
        f"For {percent(late)} of the time, device work began late for an unknown reason: record "
        "several whole steps, and synchronize before the window begins; in the rest of the time, "
        f"nothing was found {saves}"
    )


def first_lines(diagnosis: Diagnosis) -> list[list[str]]:
    """Return the verdict with its notes, and what to change first, as lines of 80 columns."""
    found = [[line for each in (verdict(diagnosis), *notes(diagnosis)) for line in wrapped(each)]]
    if first := changes(diagnosis):
        count = sum(not each.is_caveat for each in diagnosis.findings)
        some = f", {len(first)} of {count} findings" if len(first) < count else ""
        found.append([f"What to change first{some}:"])
        for number, (problem, change) in enumerate(first, 1):
            found[-1] += [*wrapped(problem, f"{number}. "), *wrapped(change, "   ")]
    return found


def changes(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the first findings: the problem with what it costs, and what to change."""
    causes = [each for each in diagnosis.findings if not each.is_caveat]
    return [(_with_saving(each), each.change) for each in causes[:_FIRST_FINDINGS]]


def saving_text(finding: Finding, step_ns: int | None) -> str:
    """Return what a change saves, of how long a step, and why it is not the share in the title.

    `step_ns` is the step that the diagnosis names.
    """
    saving = finding.saving
    if saving is None:
        return "not known"
    low, high = map(duration, sorted((saving.low_ns, saving.high_ns)))
    bounds = f", between {low} and {high}" if low != high else ""
    share = f" ({percent(saving.share)})" if saving.baseline_ns else ""
    why = _why_different(finding)
    assumes = f"{finding.assumes}, " if finding.assumes else ""
    return (
        f"{duration(saving.saving_ns)} of a {_step(finding, step_ns)}{share}{bounds}: "
        f"{assumes}a step would take {duration(saving.step_ns)}{f'; {why}' if why else ''}"
    )


def _counts(finding: Finding) -> bool:
    return finding.saving is None or finding.saving.share >= LEAST_SHARE


def _cause(finding: Finding, step_ns: int | None) -> str:
    """Return a finding as a sentence: the cause, its place, and the saving."""
    cause, saving = finding.title.partition(": ")[0], finding.saving
    place = f" ({finding.source})" if finding.source and finding.source not in cause else ""
    if saving is None:
        unknown = "" if finding.ends_run else "; the saving is not known"
        return f"{cause}{place}{unknown}."
    step, why = _step(finding, step_ns), _why_different(finding)
    assumes = finding.assumes or "without this"
    than = "" if step == "step" else f" instead of {duration(saving.baseline_ns)}"
    return (
        f"{cause}{place}; {assumes}, a {step.partition(' of ')[0]} would take "
        f"{duration(saving.step_ns)}{than} ({percent(saving.share)} less"
        f"{f': {why}' if why else ''})."
    )


def _with_saving(finding: Finding) -> str:
    saving = finding.saving
    if saving is None:
        return finding.title
    saves = f"{duration(saving.saving_ns)} ({percent(saving.share)}) {finding.assumes}".rstrip()
    return f"{finding.title}; saves {saves}"


def _step(finding: Finding, step_ns: int | None) -> str:
    """Return the step that the saving shortens, with its phase and time if they are not known."""
    saving = finding.saving
    phase = "" if finding.phase is None else f"{shortened(finding.phase, _LONGEST_PHASE)} "
    step = f"{phase}step"
    if saving is not None and (phase or duration(saving.baseline_ns) != duration(step_ns or 0)):
        step += f" of {duration(saving.baseline_ns)}"
    return step


def _why_different(finding: Finding) -> str:
    """Return why the share in a finding's title differs from the share that it saves, or ""."""
    share, saving = finding.share, finding.saving
    if share is None or saving is None or not saving.baseline_ns or finding.assumes:
        return ""
    if abs(saving.share - share) <= _ALIKE:
        return ""
    if saving.share > share:
        return f"more than the {percent(share)}, because other time in the step gets shorter too"
    return (
        f"not {percent(share)}, because other work hides a part of this time, or the change "
        "removes only a part"
    )
