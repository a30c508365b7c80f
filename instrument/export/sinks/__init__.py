"""Sinks write output from each capture; this package has the base class and the built-in ones.

Names are loaded when they are first used, because some sinks need optional packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.export.sinks.chrome_trace import ChromeTrace
    from instrument.export.sinks.memory import Memory
    from instrument.export.sinks.parquet import Parquet
    from instrument.export.sinks.report import Report
    from instrument.export.sinks.sink import Sink
    from instrument.export.sinks.stacks import Stacks
    from instrument.export.sinks.table import TableSink
    from instrument.export.sinks.tensorboard import TensorBoard
    from instrument.export.sinks.window_scalars import scalars

__all__ = [
    "ChromeTrace",
    "Memory",
    "Parquet",
    "Report",
    "Sink",
    "Stacks",
    "TableSink",
    "TensorBoard",
    "scalars",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ChromeTrace": "chrome_trace",
        "Memory": "memory",
        "Parquet": "parquet",
        "Report": "report",
        "Sink": "sink",
        "Stacks": "stacks",
        "TableSink": "table",
        "TensorBoard": "tensorboard",
        "scalars": "window_scalars",
    },
)
