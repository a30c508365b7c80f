"""Keep the captures of the newest run, if a folder holds the captures of several runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from instrument.analysis.views import Views
from instrument.printable import printable
from instrument.trace.capture_json import unix_time
from instrument.units import counted, few

_Views = TypeVar("_Views", bound=Views)


def newest_run(captures: Iterable[_Views]) -> tuple[list[_Views], list[_Views]]:
    """Divide captures into those of the newest run and those of older runs, in their order.

    Each rank has its own id of the run. So of each rank, the run whose last capture began last is
    the newest. A capture without an id or a start, such as a trace file, is not left out.
    """
    began = [(capture, _began(capture)) for capture in captures]
    last: dict[int | None, tuple[float, str]] = {}
    for capture, when in began:
        if when is not None:
            last[capture.about.rank] = max(last.get(capture.about.rank, when), when)
    newest: list[_Views] = []
    older: list[_Views] = []
    for capture, when in began:
        is_older = when is not None and when[1] != last[capture.about.rank][1]
        (older if is_older else newest).append(capture)
    return newest, older


def left_out(older: Sequence[Views]) -> str:
    """Return a sentence that names the captures of older runs, which are left out."""
    are = "is" if len(older) == 1 else "are"
    return (
        f"Only the newest run counts; {counted(len(older), 'capture')} of older runs {are} left "
        f"out: {few(printable(capture.name) for capture in older)}."
    )


def _began(capture: Views) -> tuple[float, str] | None:
    """When the recording began, and the id of its run; None if one of them is not known."""
    began_s = unix_time(capture.about.started_at)
    run = capture.about.run
    return None if began_s is None or run is None else (began_s, run)
