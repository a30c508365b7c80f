"""`diff`: how a step changed between two captures or runs, and where; the texts only format it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

from instrument.base.errors import CaptureError
from instrument.base.units import duration
from instrument.read.compare.changes import compared, counters_compared, parts_compared
from instrument.read.compare.side import Comparables, Side, common_phase, left_out, load
from instrument.read.compare.statistics import shifts
from instrument.read.compare.sums import Samples
from instrument.read.compare.unlike import Unlike, unlike
from instrument.read.views.layout import plain
from instrument.read.views.table import Table

#: What the keys of the JSON mean.
JSON_KEYS = {
    "what": "`step`, or `recording` if a side has no finished steps",
    "given": "what was compared: two paths or names",
    "before": "the names of the captures before the change",
    "after": "the names of the captures after the change",
    "unlike": "for each difference of the conditions: a `sentence`, and `misleads`, whether the "
    "difference makes the comparison misleading",
    "wholes": "the mean step of all captures, then that of each rank: `rank`, `before_ns`, "
    "`after_ns`, `change_ns`, `low_ns` and `high_ns` (the 90 % interval of the change; `null` "
    "without three captures on each side), `steps` (of each side the `count`, `median_ns` and "
    "`deviation_ns`) and `parts`, with the columns of `diff().step.parts`, which sum to the step",
    "ranges": "the rows of the ranges, with the columns of `diff().ranges`",
    "operators": "the rows of the operators, with the columns of `diff().operators`",
    "kernels": "the rows of the kernels, with the columns of `diff().kernels`",
    "shapes": "the rows of the operators by input shapes, with the columns of `diff().shapes`",
    "counters": "the counters of the step, and those of ranges that differ, with the columns of "
    "`diff().counters`",
}
TABLES = ("ranges", "operators", "kernels", "shapes", "counters")


@dataclass(frozen=True)
class Steps:
    """The steps of one side, in ns.

    `deviation_ns` is the median absolute deviation from the median, None for fewer than three
    steps. All values are rounded down.
    """

    count: int
    mean_ns: int
    median_ns: int
    deviation_ns: int | None


@dataclass(frozen=True)
class Whole:
    """The mean steps of both sides, and their parts.

    Attributes:
        rank: the rank; None for all captures together.
        before, after: the steps of both sides.
        samples: how many captures or runs were given for each side.
        low_ns, high_ns: the 90 % interval of the change; None without three samples on each side.
        parts: the parts of the mean step, the largest change first. Its columns sum exactly to the
            properties of the same names.
    """

    rank: int | None
    before: Steps
    after: Steps
    samples: tuple[int, int]
    low_ns: int | None
    high_ns: int | None
    parts: Table

    @property
    def before_ns(self) -> int:
        """The mean step before the change."""
        return self.before.mean_ns

    @property
    def after_ns(self) -> int:
        """The mean step after the change."""
        return self.after.mean_ns

    @property
    def change_ns(self) -> int:
        """How much longer the step takes after the change; negative if it is shorter."""
        return self.after_ns - self.before_ns


def whole(rank: int | None, before: Samples, after: Samples) -> Whole:
    """Compare the mean steps of two sides; `rank` is None for all captures together."""
    means = (np.array([[sum(each.steps_ns) / each.steps for each in side.each]])
             for side in (before, after))  # fmt: skip
    low, high = (None if end is None else round(end[0]) for end in shifts(*means))
    steps = _steps(before.all.steps_ns), _steps(after.all.steps_ns)
    samples = len(before.each), len(after.each)
    return Whole(rank, *steps, samples, low, high, parts_compared(before, after))


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

    `instrument.read.compare.changes` has the columns of the tables.
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
        from instrument.read.compare.text import parts

        return plain(parts(self))

    def _repr_markdown_(self) -> str:
        """The change of the step and its parts as Markdown, for a notebook."""
        from instrument.read.compare.text import as_markdown

        return as_markdown(self)

    def __repr__(self) -> str:
        times = f"{duration(self.step.before_ns)} → {duration(self.step.after_ns)}"
        return f"<Difference: {self.quantity} {times}>"


def diff(
    before: Comparables | Side, after: Comparables | Side, *, force: bool = False
) -> Difference:
    """Compare two captures, two runs, or their traces.

    The steps of all windows of a run are compared together. If both sides have several ranks, each
    rank is also compared with the same rank of the other side.

    Args:
        before: a capture, a run, or the path or URL of a capture, a trace or a run; or a list of
            them. With three or more on each side, each change has an interval. Of a folder with
            several runs, the newest is used.
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
    of_was, of_now = was.ranks(phase), now.ranks(phase)
    old, new = was.samples(phase, of_was), now.samples(phase, of_now)
    found = unlike(was.conditions[phase], now.conditions[phase], old.all, new.all)
    found += [Unlike(sentence, misleads=False) for sentence in left_out(was, now, phase)]
    step = whole(None, old, new)
    ranks = [rank for rank in of_was if rank in of_now] if len(of_was) > 1 < len(of_now) else []
    of_ranks = (
        whole(rank, was.samples(phase, [rank]), now.samples(phase, [rank])) for rank in ranks
    )
    return Difference(
        given=(was.name, now.name),
        before=old.all.captures,
        after=new.all.captures,
        what="step" if old.all.what == new.all.what == "step" else "recording",
        wholes=(step, *of_ranks),
        ranges=compared("ranges", old, new, step.parts),
        operators=compared("operators", old, new, step.parts),
        shapes=compared("shapes", old, new, step.parts),
        kernels=compared("kernels", old, new, step.parts),
        counters=counters_compared(old.all, new.all),
        unlike=tuple(found),
    )


def as_dict(found: Difference) -> dict[str, Any]:
    """Return a comparison as JSON values; docs/json.md describes the keys."""
    return {
        "what": found.what,
        "given": found.given,
        "before": found.before,
        "after": found.after,
        "unlike": [each._asdict() for each in found.unlike],
        "wholes": [_whole_as_dict(each) for each in found.wholes],
        **{name: getattr(found, name).to_dicts() for name in TABLES},
    }


def _whole_as_dict(found: Whole) -> dict[str, Any]:
    sides = {"before": asdict(found.before), "after": asdict(found.after)}
    names = ("rank", "before_ns", "after_ns", "change_ns", "low_ns", "high_ns")
    return {
        **{name: getattr(found, name) for name in names},
        "steps": {
            side: {name: steps[name] for name in ("count", "median_ns", "deviation_ns")}
            for side, steps in sides.items()
        },
        "parts": found.parts.to_dicts(),
    }


def _steps(steps_ns: Sequence[int]) -> Steps:
    middle = int(median(steps_ns)) if steps_ns else 0
    distances = [abs(each - middle) for each in steps_ns]
    return Steps(
        count=len(steps_ns),
        mean_ns=sum(steps_ns) // max(len(steps_ns), 1),
        median_ns=middle,
        deviation_ns=int(median(distances)) if len(distances) > 2 else None,
    )
