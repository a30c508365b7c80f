"""`diff`: what changed from one capture or run to another, and where the change of a step comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from instrument.analysis.table import Table
from instrument.compare.conditions import Unlike, unlike
from instrument.compare.renamed import renamed
from instrument.compare.rows import (
    counters_compared,
    kernels_compared,
    operators_compared,
    ranges_compared,
    shapes_compared,
)
from instrument.compare.side import Comparable, common_phase, left_out, load
from instrument.compare.step_change import Whole, whole
from instrument.compare.totals import added
from instrument.errors import CaptureError
from instrument.units import duration

__all__ = ["Comparable", "Difference", "diff"]


@dataclass(frozen=True)
class Difference:
    """What changed from one capture or run to another. All quantities are means of a step.

    Attributes:
        given: what was compared, as text, such as two paths.
        before, after: the names of the captures of each side.
        what: "step", or "recording" if a side has no finished steps.
        wholes: the mean step of all captures; then, if both sides have several ranks, that of each
            rank which both sides have.
        ranges: the ranges, the largest change first; see `RANGES_COMPARED`.
        operators: the operators and runtime calls; see `OPERATORS_COMPARED`.
        shapes: the operators by their input shapes; see `SHAPES_COMPARED`. Empty without shapes.
        kernels: the kernels and copies; see `KERNELS_COMPARED`.
        counters: the counters of the step, and those of ranges that differ, such as launches; see
            `COUNTERS_COMPARED`.
        unlike: how the conditions of both sides differ, those that mislead first.
    """

    given: tuple[str, str]
    before: tuple[str, ...]
    after: tuple[str, ...]
    what: Literal["step", "recording"]
    wholes: tuple[Whole, ...]
    ranges: Table
    operators: Table
    shapes: Table
    kernels: Table
    counters: Table
    unlike: tuple[Unlike, ...]

    @property
    def step(self) -> Whole:
        """The mean step of all captures."""
        return self.wholes[0]

    def __repr__(self) -> str:
        times = f"{duration(self.step.before_ns)} → {duration(self.step.after_ns)}"
        return f"<Difference: {self.what} {times}>"


def diff(before: Comparable, after: Comparable, *, force: bool = False) -> Difference:
    """Compare two captures, two runs, or their traces.

    The windows of a run are taken together. If both sides have several ranks, each rank is also
    compared with itself. Captures are read one after the other.

    Args:
        before: a capture, a run, or the path or URL of a capture, a trace, or a run's folder.
        after: the same, after the change.
        force: whether to compare captures that are too unlike as well.

    Cost: about as much as reading all captures and making their operator tables.

    Raises:
        CaptureError: a side has no capture that can be read, or the sides are so unlike that a
            comparison would mislead.
        TraceError: the only trace of a side cannot be read.
    """
    was, now = load(before), load(after)
    phase = common_phase(was, now)
    of_was, of_now = was.of_phase(phase), now.of_phase(phase)
    old, new = added(of_was.values()), added(of_now.values())
    found = unlike(was.conditions[phase], now.conditions[phase], old, new)
    if found and found[0].misleads and not force:
        raise CaptureError(
            f"{was.name} and {now.name} are too unlike to be compared: {found[0].sentence} Use "
            "--force (force=True) to compare them nevertheless."
        )
    found += [Unlike(sentence, misleads=False) for sentence in left_out(was, now, phase)]
    paths = renamed(old, new)
    step = whole(None, old, new, paths)
    ranks = [rank for rank in of_was if rank in of_now] if len(of_was) > 1 < len(of_now) else []
    return Difference(
        given=(was.name, now.name),
        before=old.captures,
        after=new.captures,
        what="step" if old.what == new.what == "step" else "recording",
        wholes=(step, *(whole(rank, of_was[rank], of_now[rank], paths) for rank in ranks)),
        ranges=ranges_compared(old, new, paths, step),
        operators=operators_compared(old, new),
        shapes=shapes_compared(old, new),
        kernels=kernels_compared(old, new),
        counters=counters_compared(old, new, paths),
        unlike=tuple(found),
    )
