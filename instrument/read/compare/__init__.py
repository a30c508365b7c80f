"""Compare captures: what changed between them, and whether a step stays within a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.read.compare.difference import Difference, Steps, Whole

__all__ = [
    "Difference",
    "Steps",
    "Whole",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Difference": "difference",
        "Steps": "difference",
        "Whole": "difference",
    },
)
