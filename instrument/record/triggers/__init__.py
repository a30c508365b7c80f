"""Triggers request windows; this package has the base class and the built-in ones.

Names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.record.triggers.file import File
    from instrument.record.triggers.memory_growth import MemoryGrowth
    from instrument.record.triggers.non_finite_loss import NonFiniteLoss
    from instrument.record.triggers.out_of_memory import OutOfMemory
    from instrument.record.triggers.signal import Signal
    from instrument.record.triggers.slow_step import SlowStep
    from instrument.record.triggers.trigger import (
        Answer,
        Request,
        RequestWindow,
        Step,
        Trigger,
        TriggerCallbacks,
    )

__all__ = [
    "Answer",
    "File",
    "MemoryGrowth",
    "NonFiniteLoss",
    "OutOfMemory",
    "Request",
    "RequestWindow",
    "Signal",
    "SlowStep",
    "Step",
    "Trigger",
    "TriggerCallbacks",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Answer": "trigger",
        "File": "file",
        "MemoryGrowth": "memory_growth",
        "NonFiniteLoss": "non_finite_loss",
        "OutOfMemory": "out_of_memory",
        "Request": "trigger",
        "RequestWindow": "trigger",
        "Signal": "signal",
        "SlowStep": "slow_step",
        "Step": "trigger",
        "Trigger": "trigger",
        "TriggerCallbacks": "trigger",
    },
)
