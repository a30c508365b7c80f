"""The tables of one capture, made from the events of its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.read.views.memory_timeline import MemoryView
    from instrument.read.views.table import Table

__all__ = [
    "MemoryView",
    "Table",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "MemoryView": "memory_timeline",
        "Table": "table",
    },
)
