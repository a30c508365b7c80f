"""The verdict: how long a step takes, what slows it most, what the change saves, and where it is.

The log, `instrument show`, `instrument diagnose`, the report page and a notebook begin with it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from instrument.base.prose import shortened, wrapped
from instrument.base.units import duration, percent
from instrument.read.advise.finding import Finding, Saving
from instrument.read.simulate.scenario import MOST_UNEXPLAINED
from instrument.read.trace.events import loader_iterator

if TYPE_CHECKING:
    from instrument.read.advise.diagnosis import Diagnosis

#: If no finding is known to save this share of a step, the verdict says so.
LEAST_SHARE = 0.03
# If the share in a finding's title and the share that it saves differ by more than this, the saving
# says why.
_ALIKE = 0.03
# A smaller lower bound of a saving is as good as nothing.
_NOTHING = 0.01
# If the steps got no CPU for more than this share of the window, nothing is known of the program.
_BUSY = 0.5
# A finding that saves less than this share of a step is named after what takes many times as much.
_SURE, _MANY_TIMES = 0.1, 4
_BELOW = " " * 12
LINES = "Where the time goes, by samples of the whole run:"
_LONGEST_NAME = 44
# How many findings the verdict lists where tables follow.
_FIRST_FINDINGS = 3
# The title of a finding up to its details, which follow a colon; quoted names may have colons too.
_CAUSE = re.compile(r"""(?:(?<!\w)(?:'[^']*'|"[^"]*")|(?!:\ ).)*""", re.DOTALL)


def verdict(diagnosis: Diagnosis) -> str:
    """Return how long a step takes, and the first finding: the cause, its place, the saving.

    If the finding is not known to save 3 % of a step, the next of `causes` that is follows. What
    takes most of a step comes next, with what a change of it can save at most; it comes first if it
    is far larger than the saving. With device work, sentences say what the device does, what it
    waits for, and which kernels it runs; without it, a sentence names the largest parts of a step.
    Without a large saving, the last sentence says that there is none. A caveat is never the cause
    (see `notes`). The result may hold names from a trace: escape it.
    """
    takes, use = _step_takes(diagnosis), diagnosis.device_use
    heaviest, parts = diagnosis.heaviest, diagnosis.largest_parts
    found = causes(diagnosis)
    large = [each for each in found if is_large(each)]
    first = [_cause(each, diagnosis) for each in found[:1]]
    if not large:
        nothing = [f"{nothing_found(diagnosis)}."]
        if diagnosis.lines and _is_busy(diagnosis):  # a note says so
            nothing = []
        if any(each.saving is not None for each in found[:1]):
            first = [*nothing, f"The largest saving: {first[0]}"]
        return _joined(takes, use, heaviest, parts, *(first or nothing))
    if found[0] not in large:
        first.append(f"Also: {_cause(large[0], diagnosis)}")
    saving = large[0].saving.share if large[0].saving else 0.0
    if use or diagnosis.lines:  # the parts only fill in for these
        parts = ""
    if heaviest and not _is_proven(large[0]):
        return _joined(takes, use, heaviest, parts, f"Perhaps: {' '.join(first)}")
    if saving < _SURE and _MANY_TIMES * saving < diagnosis.heaviest_share:
        return _joined(takes, use, heaviest, parts, f"A cause of a part of it: {' '.join(first)}")
    return _joined(takes, use, *first, heaviest, parts)


def without_cause(diagnosis: Diagnosis) -> str:
    """Return the sentences of the verdict that a list of findings does not repeat."""
    said = _step_takes(diagnosis), diagnosis.device_use, diagnosis.heaviest, diagnosis.largest_parts
    return _joined(*said, "" if causes(diagnosis) else f"{nothing_found(diagnosis)}.")


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _step_takes(diagnosis: Diagnosis) -> str:
    """How long a step takes; "" if it is not known."""
    if diagnosis.step_ns is None:
        return ""
    median = " (median of the captures)" if len(diagnosis.captures) > 1 else ""
    if diagnosis.between_ns is not None:
        low, high = map(duration, diagnosis.between_ns)
        median = f" (median of the captures, which differ: {low} to {high})"
    kinds = f" on average: {diagnosis.step_kinds}" if diagnosis.step_kinds else ""
    step = _step_of(diagnosis, diagnosis.step_phase)
    return f"{step[0].upper()}{step[1:]} takes {duration(diagnosis.step_ns)}{median}{kinds}."


def causes(diagnosis: Diagnosis) -> list[Finding]:
    """Return the findings without the caveats; the verdict names the first of them."""
    return [each for each in diagnosis.findings if not each.is_caveat]


def notes(diagnosis: Diagnosis) -> list[str]:
    """Return a sentence for each caveat, such as a busy machine, and for what is not known.

    The last one says what the layers are known from, if not from what was recorded.
    """
    found = [f"Note: {each.title}." for each in diagnosis.findings if each.is_caveat]
    late = diagnosis.unexplained or 0.0
    if late > MOST_UNEXPLAINED and not any(map(is_large, diagnosis.findings)):
        found.append(
            f"Note: for {percent(late)} of the time, the trace does not show why device work began "
            "so late, so savings are less certain: record several whole steps, and synchronise "
            "before the window begins."
        )
    layers = diagnosis.layers
    said = f"{layers}" if layers is not None and layers.is_partial else ""
    return [*found, *filter(None, [diagnosis.lost_events, said])]


def nothing_found(diagnosis: Diagnosis) -> str:
    """Return the sentence for a diagnosis without large findings. The sentence has no full stop."""
    if diagnosis.step_ns is None:
        return "Nothing found; the savings are not known, because no step could be simulated"
    if _is_busy(diagnosis):
        return "The machine was too busy for a verdict: record again when it is idle"
    if diagnosis.near_peak:
        return f"Nothing stands out: {diagnosis.near_peak}"
    if not diagnosis.heaviest_share:
        return f"Nothing found {_large(diagnosis)}"
    bound = f": at most {percent(diagnosis.heaviest_share)} less if the largest part cost nothing"
    return f"No check finds a cause {_large(diagnosis)}{'' if diagnosis.heaviest else bound}"


def first_lines(diagnosis: Diagnosis) -> list[list[str]]:
    """Return the verdict, what to change, and where the time goes, as lines of 80 columns."""
    said, problems = wrapped(verdict(diagnosis)), changes(diagnosis)
    noted = [line for each in notes(diagnosis) for line in wrapped(each)]
    is_named = any(map(is_large, causes(diagnosis)[:1]))  # in the verdict
    found = [said, wrapped(problems[0][1], "Change: "), noted] if is_named else [[*said, *noted]]
    if diagnosis.lines:
        rows = (wrapped(each, indent=_BELOW) for each in diagnosis.lines)
        found.append([LINES, *(line for row in rows for line in row)])
    if problems := problems[is_named:]:
        count = sum(not each.is_caveat for each in diagnosis.findings)
        some = f", {len(problems) + is_named} of {count} findings"
        some = some if len(problems) + is_named < count else ""
        found.append([f"What to change {'next' if is_named else 'first'}{some}:"])
        for number, (problem, change) in enumerate(problems, 1 + is_named):
            found[-1] += [*wrapped(problem, f"{number}. "), *wrapped(change, "   ")]
    return [each for each in found if each]


def changes(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return the first findings: the problem with what it costs, and what to change."""
    return [(_with_saving(each), each.change) for each in causes(diagnosis)[:_FIRST_FINDINGS]]


def saved(saving: Saving) -> str:
    """Return a saving as text, such as "1.200 s (30 %)"; if its bounds are far apart, these."""
    low, high = saving.bounds
    if not saving.is_wide:
        return f"{duration(saving.saving_ns)} ({percent(saving.share)})"
    if low.share < _NOTHING:
        return f"up to {duration(high.saving_ns)} ({percent(high.share)})"
    times = f"{duration(low.saving_ns)} to {duration(high.saving_ns)}"
    return f"{times} ({percent(low.share)} to {percent(high.share)})"


def saving_text(finding: Finding, diagnosis: Diagnosis) -> str:
    """Return what a change saves, of how long a step, and why it is not the share in the title."""
    saving = finding.saving
    if saving is None:
        return "not known"
    low, high = duration(saving.low_ns), duration(saving.high_ns)
    bounds = f", between {low} and {high}" if low != high else ""
    share = f" ({percent(saving.share)})" if saving.baseline_ns else ""
    step, why = _step(diagnosis, finding), _why_different(finding)
    if _has_other_step(finding, diagnosis):
        step += f" of {duration(saving.baseline_ns)}{_where(finding, diagnosis)}"
    assumes = f"{finding.assumes}, " if finding.assumes else ""
    return (
        f"{duration(saving.saving_ns)} of {step}{share}{bounds}: {assumes}{_step(diagnosis)} would "
        f"take {duration(saving.step_ns)}{f'; {why}' if why else ''}"
    )


def _large(diagnosis: Diagnosis) -> str:
    """Return the clause that `is_large` stands for, as "nothing" goes on with it."""
    is_known = all(each.saving or each.is_caveat for each in diagnosis.findings)
    saves = "saves" if is_known else "is known to save"
    return f"that {saves} more than {LEAST_SHARE * 100:.0f} % of {_step(diagnosis)}"


def _is_proven(finding: Finding) -> bool:
    """Whether the saving does not depend on a condition without which there is none."""
    is_conditional = finding.assumes.startswith("if ")
    return finding.saving is not None and not (is_conditional and finding.saving.low_ns <= 0)


def _is_busy(diagnosis: Diagnosis) -> bool:
    """Whether the thread of the steps got no CPU for most of the time."""
    return any(
        each.code == "busy-cpus" and (each.share or 0) > _BUSY for each in diagnosis.findings
    )


def is_large(finding: Finding) -> bool:
    """Whether a finding is known to save `LEAST_SHARE` of a step."""
    return finding.saving is not None and finding.saving.share >= LEAST_SHARE


def _cause(finding: Finding, diagnosis: Diagnosis) -> str:
    """Return a finding as a sentence: the cause, its place, and the saving."""
    cause, saving = _CAUSE.findall(finding.title)[0], finding.saving
    path, source = finding.range or "", finding.source or ""
    if loader_iterator(path.rpartition("/")[2]):  # torch's range, for a wait that the cause names
        path = ""
    places = {path: f"range {shortened(path, _LONGEST_NAME)}", source: source}
    named = ", ".join(text for name, text in places.items() if name not in cause)
    place = f" ({named})" if named else ""
    if saving is None:
        unknown = "" if finding.ends_run else "; the saving is not known"
        return f"{cause}{place}{unknown}."
    takes, less = duration(saving.step_ns), percent(saving.share)
    low, high = saving.bounds
    if saving.is_wide and low.share < _NOTHING:
        takes, less = f"at least {duration(high.step_ns)}", f"up to {percent(high.share)}"
    elif saving.is_wide:
        takes = f"{duration(high.step_ns)} to {duration(low.step_ns)}"
        less = f"{percent(low.share)} to {percent(high.share)}"
    if _has_other_step(finding, diagnosis):
        takes += f" instead of {duration(saving.baseline_ns)}{_where(finding, diagnosis)}"
    assumes, step = finding.assumes or "without this", _step(diagnosis, finding)
    return f"{cause}{place}; {assumes}, {step} would take {takes} ({less} less)."


def _with_saving(finding: Finding) -> str:
    saving = finding.saving
    if saving is None:
        return finding.title
    return f"{finding.title}; saves {saved(saving)} {finding.assumes}".rstrip()


def _step(diagnosis: Diagnosis, finding: Finding | None = None) -> str:
    """Return what the saving of a finding is a part of, with its phase if phases differ."""
    return _step_of(diagnosis, finding.phase if finding else None)


def _step_of(diagnosis: Diagnosis, phase: str | None) -> str:
    if not diagnosis.has_steps:
        return "the recording"
    return "a step" if phase is None else f"a {shortened(phase, _LONGEST_NAME)} step"


def _has_other_step(finding: Finding, diagnosis: Diagnosis) -> bool:
    """Whether the step that a saving shortens is not the one that the diagnosis names."""
    saving = finding.saving
    if saving is None:
        return False
    baseline, step = duration(saving.baseline_ns), duration(diagnosis.step_ns or 0)
    return finding.phase is not None or baseline != step


def _where(finding: Finding, diagnosis: Diagnosis) -> str:
    """Return which of several captures has the step that a saving shortens, without a phase."""
    is_one_of_many = len(diagnosis.captures) > 1 and finding.phase is None
    return f" in {finding.capture}" if is_one_of_many and finding.capture else ""


def _why_different(finding: Finding) -> str:
    """Return why the share in a finding's title differs from the share that it saves, or ""."""
    share, saving = finding.share, finding.saving
    if share is None or saving is None or not saving.baseline_ns or finding.assumes:
        return ""
    low, high = (each.share for each in (saving.bounds if saving.is_wide else (saving, saving)))
    if low - _ALIKE <= share <= high + _ALIKE:
        return ""
    if low > share:
        return f"more than the {percent(share)}, because other time in the step gets shorter too"
    return (
        f"not {percent(share)}, because other work hides a part of this time, or the change "
        "removes only a part"
    )
