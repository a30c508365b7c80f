"""Plots of memory in use over time, split by operator, range, module or category."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instrument.read.facts.memory_attribution import By
from instrument.read.trace.events import Ints


@dataclass(frozen=True, slots=True)
class Plot:
    """Memory in use on a device over time, for a plot.

    Attributes:
        device: the device, as in torch.
        time_ns: the times of the plot's points.
        reserved_bytes: the memory that the allocator has reserved; None if it was not recorded.
        series: for each name in the legend, its bytes at each time; they sum to the memory in use.
    """

    device: str
    time_ns: list[int]
    reserved_bytes: list[int] | None
    series: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Curve(Plot):
    """A plot with a series for each operator, range or module that allocated memory."""

    by: By


def extremes(level: Ints, time_ns: Ints, points: int) -> Ints:
    """The positions of the first and last point, and of the extremes in each of `points` spans."""
    since = time_ns - time_ns[0]
    span = since * points // (int(since[-1]) + 1)
    rising = np.lexsort((level, span))
    bounds = np.searchsorted(span[rising], np.unique(span))
    ends = np.array([0, len(level) - 1, int(np.argmax(level))])
    return np.unique(
        np.concatenate([rising[bounds], rising[np.append(bounds[1:], len(level)) - 1], ends])
    )
