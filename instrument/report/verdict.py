"""The verdict on a run: one sentence that says what slows it most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.errors import reason_of
from instrument.findings.diagnose import Diagnosis, diagnose
from instrument.findings.diagnosis_text import LEAST_SHARE, as_markdown, nothing_found
from instrument.findings.finding import Finding
from instrument.prose import code, escaped

if TYPE_CHECKING:
    from instrument.capture import Capture


def verdict(diagnosis: Diagnosis) -> str:
    """Return what slows a run most: the title of the largest finding, without a full stop.

    A finding counts if it saves at least 3 % of a step, or if its saving is not known. If no
    finding counts, a sentence says so. Among the findings with an unknown saving, one can have a
    share of the step that is larger than the largest saving. Then its title is added. Titles may
    hold names from a trace: escape the result for the place where it is shown.
    """
    counting = [finding for finding in diagnosis.findings if _counts(finding)]
    if not counting:
        return nothing_found(diagnosis)
    first, *others = counting
    unknown = [each for each in others if each.saving is None and (each.share or 0) > _saved(first)]
    largest = sorted(unknown, key=lambda each: -(each.share or 0))[:1]
    return "; also, ".join(each.title for each in (first, *largest))


def verdict_of(capture: Capture) -> str:
    """Return the verdict on one capture, or a sentence that says why it cannot be diagnosed."""
    try:
        return verdict(diagnose([capture], ranks_checks=()))
    except Exception as error:  # the tables beside the verdict are shown anyway
        return f"The capture could not be diagnosed: {reason_of(error)}"


def verdict_as_markdown(capture: Capture) -> str:
    """Return the verdict on one capture and the diagnosis below it; see `diagnosis.as_markdown`."""
    try:
        diagnosis = diagnose([capture], ranks_checks=())
    except Exception as error:
        return f"The capture could not be diagnosed: {code(reason_of(error))}"
    return f"**{escaped(verdict(diagnosis))}**\n\n{as_markdown(diagnosis)}"


def _counts(finding: Finding) -> bool:
    return finding.saving is None or _saved(finding) >= LEAST_SHARE


def _saved(finding: Finding) -> float:
    """Return the fraction of the step that a finding saves; 1 if its saving is not known."""
    saving = finding.saving
    return 1.0 if saving is None else saving.saving_ns / max(saving.baseline_ns, 1)
