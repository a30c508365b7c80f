"""The first section of the page: how long a step takes, where it goes, and what to change."""

from __future__ import annotations

from typing import Any

from instrument.analysis.views import Views
from instrument.findings.diagnose import Diagnosis
from instrument.report.notebook import heading


def section(capture: Views, diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the verdict.

    The keys: `facts` (lines about the recording), `step_ns` (the simulated step, or None),
    `findings`, `passed`, `not_checked`, `notes`.
    """
    return {
        "facts": heading(capture).splitlines(),
        "step_ns": diagnosis.step_ns,
        "findings": [],
        "passed": list(diagnosis.passed),
        "not_checked": list(diagnosis.not_checked),
        "notes": list(diagnosis.notes),
    }
