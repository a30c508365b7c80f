"""The verdict on a run: one sentence that says what slows it most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.errors import reason_of
from instrument.findings.diagnose import Diagnosis, diagnose
from instrument.findings.diagnosis_text import LEAST_SHARE, as_markdown, nothing_found
from instrument.findings.finding import Finding
from instrument.printable import printable
from instrument.prose import code, escaped

if TYPE_CHECKING:
    from instrument.capture import Capture


def verdict(diagnosis: Diagnosis) -> str:
    """Return what slows a run most: the title of the largest finding, without a full stop.

    A finding counts if it saves at least 3 % of a step, or if its saving is not known. The title
    may hold names from a trace, so escape it for the place where it is shown.
    """
    for finding in diagnosis.findings:
        if _counts(finding):
            return finding.title
    return nothing_found(diagnosis)


def verdict_of(capture: Capture) -> str:
    """Return the verdict on one capture; if it cannot be diagnosed, a sentence that says why."""
    try:
        return verdict(diagnose([capture], ranks_checks=()))
    except Exception as error:  # the tables beside the verdict are shown anyway
        return f"The capture could not be diagnosed: {printable(reason_of(error))}"


def verdict_as_markdown(capture: Capture) -> str:
    """Return the verdict on one capture and the diagnosis below it; see `diagnosis.as_markdown`."""
    try:
        diagnosis = diagnose([capture], ranks_checks=())
    except Exception as error:
        return f"The capture could not be diagnosed: {code(reason_of(error))}"
    return f"**{escaped(verdict(diagnosis))}**\n\n{as_markdown(diagnosis)}"


def _counts(finding: Finding) -> bool:
    saving = finding.saving
    return saving is None or saving.saving_ns >= LEAST_SHARE * saving.baseline_ns
