"""`diff`: compare two captures or runs, and split the change of the step into parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from instrument.analysis.layout import plain
from instrument.analysis.table import Table
from instrument.compare.conditions import Unlike, unlike
from instrument.compare.difference_text import as_markdown, parts
from instrument.compare.rows import compared, counters_compared
from instrument.compare.side import Comparable, Side, common_phase, left_out, load
from instrument.compare.step_change import Whole, whole
from instrument.compare.totals import added
from instrument.errors import CaptureError
from instrument.units import duration

__all__ = ["Comparable", "Difference", "compare", "diff"]


@dataclass(frozen=True)
class Difference:
    """The difference between two captures or runs. Quantities are means per step.

    Attributes:
        given: the names of the two sides, such as two paths.
        before, after: the names of the captures of each side.
        what: "step", or "recording" if a side has no finished steps.
        wholes: first the mean step of all captures; then, if both sides have several ranks, the
            mean step of each common rank.
        ranges: the ranges, the largest change first.
        operators: the operators, and the calls of the device's runtime.
        shapes: the operators by their input shapes; empty if no shapes were recorded.
        kernels: the kernels and copies.
        counters: all counters of the step, and each counter that differs in a range.
        unlike: other differences between the two sides, such as another device; those that make the
            comparison misleading come first.

    `instrument.compare.rows` has the columns of the tables.
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

    @property
    def quantity(self) -> str:
        """What the times are: "mean step" or "recording"."""
        return "mean step" if self.what == "step" else self.what

    @property
    def refusal(self) -> str | None:
        """Why the comparison would mislead, in one sentence; None if it would not."""
        if not self.unlike or not self.unlike[0].misleads:
            return None
        was, now = self.given
        return f"{was} and {now} are too unlike to be compared: {self.unlike[0].sentence}"

    def __str__(self) -> str:
        """The text that `instrument diff` prints."""
        return plain(parts(self))

    def _repr_markdown_(self) -> str:
        """The change of the step and its parts as Markdown, for a notebook."""
        return as_markdown(self)

    def __repr__(self) -> str:
        times = f"{duration(self.step.before_ns)} → {duration(self.step.after_ns)}"
        return f"<Difference: {self.quantity} {times}>"


def diff(before: Comparable | Side, after: Comparable | Side, *, force: bool = False) -> Difference:
    """Compare two captures, two runs, or their traces.

    The steps of all windows of a run are compared together. If both sides have several ranks, each
    rank is also compared with the same rank of the other side.

    Args:
        before: a capture, a run, or the path or URL of a capture, a trace or a run. Of a folder
            with several runs, the newest is used.
        after: the side after the change, in one of the same forms.
        force: compare the sides even if the comparison would mislead.

    Cost: about as much as reading all captures and making their operator tables.

    Raises:
        CaptureError: a side has no capture that can be read, or the sides are so unlike that a
            comparison would mislead.
        TraceError: no trace of a side can be read.
    """
    found = compare(load(before), load(after))
    if found.refusal and not force:
        raise CaptureError(
            f"{found.refusal} Use instrument diff --force (force=True) to compare them "
            "nevertheless."
        )
    return found


def compare(was: Side, now: Side) -> Difference:
    """Compare two sides that were already read, even if the comparison would mislead.

    Raises:
        CaptureError: no phase, such as training or validation, was recorded on both sides.
    """
    phase = common_phase(was, now)
    of_was, of_now = was.of_phase(phase), now.of_phase(phase)
    old, new = added(of_was.values()), added(of_now.values())
    found = unlike(was.conditions[phase], now.conditions[phase], old, new)
    found += [Unlike(sentence, misleads=False) for sentence in left_out(was, now, phase)]
    step = whole(None, old, new)
    ranks = [rank for rank in of_was if rank in of_now] if len(of_was) > 1 < len(of_now) else []
    return Difference(
        given=(was.name, now.name),
        before=old.captures,
        after=new.captures,
        what="step" if old.what == new.what == "step" else "recording",
        wholes=(step, *(whole(rank, of_was[rank], of_now[rank]) for rank in ranks)),
        ranges=compared("ranges", old, new, step),
        operators=compared("operators", old, new),
        shapes=compared("shapes", old, new),
        kernels=compared("kernels", old, new),
        counters=counters_compared(old, new),
        unlike=tuple(found),
    )
