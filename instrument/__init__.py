"""A profiler for PyTorch: mark code, record some training steps, and read what took the time.

The names below are loaded when they are first used, so `import instrument` does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.annotate.modules import instrument_model
    from instrument.annotate.profiled import mark, profiled, range_pop, range_push
    from instrument.base.errors import (
        CaptureError,
        ConfigError,
        GraphError,
        InstrumentError,
        MissingPackage,
        TraceError,
        TraceWarning,
    )
    from instrument.export.sinks.sink import Sink
    from instrument.read.advise.diagnose import diagnose
    from instrument.read.capture import Capture
    from instrument.read.compare.diff import diff
    from instrument.record.config.schema import ProfilerConfig
    from instrument.record.requests import RequestedWindow
    from instrument.record.session import Session
    from instrument.record.triggers.trigger import Trigger

__version__ = "0.1.0"

__all__ = [
    "Capture",
    "CaptureError",
    "ConfigError",
    "GraphError",
    "InstrumentError",
    "MissingPackage",
    "ProfilerConfig",
    "RequestedWindow",
    "Session",
    "Sink",
    "TraceError",
    "TraceWarning",
    "Trigger",
    "diagnose",
    "diff",
    "instrument_model",
    "mark",
    "profiled",
    "range_pop",
    "range_push",
]

_HOMES = {
    "Capture": "read.capture",
    "CaptureError": "base.errors",
    "ConfigError": "base.errors",
    "GraphError": "base.errors",
    "InstrumentError": "base.errors",
    "MissingPackage": "base.errors",
    "ProfilerConfig": "record.config.schema",
    "RequestedWindow": "record.requests",
    "Session": "record.session",
    "Sink": "export.sinks.sink",
    "TraceError": "base.errors",
    "TraceWarning": "base.errors",
    "Trigger": "record.triggers.trigger",
    "diagnose": "read.advise.diagnose",
    "diff": "read.compare.diff",
    "instrument_model": "annotate.modules",
    "mark": "annotate.profiled",
    "profiled": "annotate.profiled",
    "range_pop": "annotate.profiled",
    "range_push": "annotate.profiled",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
