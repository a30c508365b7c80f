"""The verdict on a run: one sentence that says what slows it most."""

from __future__ import annotations

from instrument.analysis.views import Views
from instrument.base.errors import reason_of
from instrument.base.prose import code, escaped
from instrument.findings.diagnose import diagnose
from instrument.findings.diagnosis import LEAST_SHARE, Diagnosis, as_markdown, nothing_found
from instrument.findings.finding import Finding


def verdict(diagnosis: Diagnosis) -> str:
    """Return what slows a run most: the title of the largest finding, without a full stop.

    A finding counts if it saves at least 3 % of a step, or if its saving is not known. If no
    finding counts, a sentence says so. If the saving of the largest finding is not known, the title
    of the largest one with a known saving is added. Titles may hold names from a trace: escape the
    result for the place where it is shown.
    """
    counting = [finding for finding in diagnosis.findings if _counts(finding)]
    if not counting:
        return nothing_found(diagnosis)
    first, *others = counting
    known = [each for each in others if each.saving is not None and first.saving is None][:1]
    return "; also, ".join(each.title for each in (first, *known))


def verdict_of(capture: Views) -> str:
    """Return the verdict on one capture, or a sentence that says why it cannot be diagnosed."""
    try:
        return verdict(diagnose([capture], ranks_checks=()))
    except Exception as error:  # the tables beside the verdict are shown anyway
        return f"The capture could not be diagnosed: {reason_of(error)}"


def verdict_as_markdown(capture: Views) -> str:
    """Return the verdict on one capture and the diagnosis below it; see `diagnosis.as_markdown`."""
    try:
        diagnosis = diagnose([capture], ranks_checks=())
    except Exception as error:
        return f"The capture could not be diagnosed: {code(reason_of(error))}"
    return f"**{escaped(verdict(diagnosis))}**\n\n{as_markdown(diagnosis)}"


def _counts(finding: Finding) -> bool:
    return finding.saving is None or finding.saving.share >= LEAST_SHARE
