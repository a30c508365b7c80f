"""Keep the captures of the newest run, if a folder holds the captures of several runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from instrument.analysis.views import Views
from instrument.printable import printable
from instrument.runs.run import TOGETHER_S
from instrument.trace.capture_json import unix_time
from instrument.units import counted, few

_Views = TypeVar("_Views", bound=Views)


class _Process(NamedTuple):
    """A process that recorded captures; `number` is its id, or else the id of its run."""

    host: str
    number: str
    world_size: int


class _Began(NamedTuple):
    """When a recording began, in seconds since 1970, and on which rank and in which process."""

    second: float
    rank: int | None
    process: _Process


def newest_run(captures: Iterable[_Views]) -> tuple[list[_Views], list[_Views]]:
    """Divide captures into those of the newest run and those of older runs, in their order.

    The process whose last capture began last belongs to the newest run, with all its captures: one
    process may train and then validate. Of each other rank, only its newest process can belong to
    the run. It does if it has the same number of ranks, and did not end long before the run began.
    A capture without the id of its run or without a start, such as a trace file, is not left out.
    """
    captures = list(captures)
    began = [_began(capture) for capture in captures]
    bounds: dict[_Process, tuple[float, float]] = {}
    last_of_rank: dict[int | None, tuple[float, _Process]] = {}
    for known in filter(None, began):
        first, last = bounds.get(known.process, (known.second, known.second))
        bounds[known.process] = min(first, known.second), max(last, known.second)
        latest = (known.second, known.process)
        last_of_rank[known.rank] = max(last_of_rank.get(known.rank, latest), latest)
    newest: list[_Views] = []
    older: list[_Views] = []
    if bounds:
        run = max(bounds, key=lambda process: (bounds[process][1], process))
        run_began = bounds[run][0]
    for capture, each in zip(captures, began):
        is_newest = each is None or (
            each.process == last_of_rank[each.rank][1]
            and each.process.world_size == run.world_size
            and bounds[each.process][1] >= run_began - TOGETHER_S
        )
        (newest if is_newest else older).append(capture)
    return newest, older


def left_out(older: Sequence[Views]) -> str:
    """Return a sentence that names the captures of older runs, which are left out."""
    are = "is" if len(older) == 1 else "are"
    return (
        f"Only the newest run counts; {counted(len(older), 'capture')} of older runs {are} left "
        f"out: {few(printable(capture.name) for capture in older)}."
    )


def _began(capture: Views) -> _Began | None:
    """When the recording began, and in which process; None if this is not known."""
    about = capture.about
    second = unix_time(about.started_at)
    if second is None or about.run is None:
        return None
    number = about.run if about.pid is None else str(about.pid)
    process = _Process(about.host or "", number, about.world_size or 1)
    return _Began(second, about.rank, process)
