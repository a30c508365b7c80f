"""Read and compare the captures of a run's windows and ranks, and merge traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrument.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from instrument.read.ranks.run import Ranks, Run

__all__ = [
    "Ranks",
    "Run",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Ranks": "run",
        "Run": "run",
    },
)
