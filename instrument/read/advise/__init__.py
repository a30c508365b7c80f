"""Find what makes a run slow, what to change, and how long a step would take after the change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.read.advise.check import Check, NotRecorded, Problem
    from instrument.read.advise.diagnose import CHECKS
    from instrument.read.advise.diagnosis import Diagnosis
    from instrument.read.advise.finding import Evidence, Finding, Saving

__all__ = [
    "CHECKS",
    "Check",
    "Diagnosis",
    "Evidence",
    "Finding",
    "NotRecorded",
    "Problem",
    "Saving",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CHECKS": "diagnose",
        "Check": "check",
        "Diagnosis": "diagnosis",
        "Evidence": "finding",
        "Finding": "finding",
        "NotRecorded": "check",
        "Problem": "check",
        "Saving": "finding",
    },
)
