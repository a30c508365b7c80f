"""The change of the mean step, as a sum of parts.

The mean step is the total time of the steps divided by their number, rounded down to nanoseconds.
The parts are divided in the same way, and the missing nanoseconds are added to those with the
largest remainders. So the parts of each side sum to its step exactly, and their changes to its
change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from instrument.read.compare.totals import Totals
from instrument.read.facts.schema import Schema, schema
from instrument.read.views.table import Table

PARTS: Schema = schema(
    range="the path of the range; (no range) outside of all ranges; (no launch) for device work "
    "whose launch is not in the trace",
    kind="compute, exposed communication, copy, waiting for data, launch, CPU operators, Python or "
    "idle; see `instrument.read.facts.segments`",
    before_ns="in a mean step before the change: the time that counts for this range and kind",
    after_ns="the same after the change",
    change_ns="`after_ns` minus `before_ns`",
)

# Times in ns, by range and kind.
_Parts = dict[tuple[str, str], int]


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
        parts: the parts of the mean step, the largest change first; see `PARTS`. Its columns sum
            exactly to the properties of the same names.
    """

    rank: int | None
    before: Steps
    after: Steps
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


def whole(rank: int | None, before: Totals, after: Totals) -> Whole:
    """Compare the mean steps of two sides; `rank` is None for all captures together."""
    old, new = mean_parts(before), mean_parts(after)
    rows = []
    for path, kind in old | new:
        before_ns, after_ns = old.get((path, kind), 0), new.get((path, kind), 0)
        rows.append((path, kind, before_ns, after_ns, after_ns - before_ns))
    rows.sort(key=lambda row: (-abs(row[4]), -row[3], row[:2]))
    parts = Table.of_rows(PARTS, rows)
    return Whole(rank, _steps(before.steps_ns), _steps(after.steps_ns), parts)


def mean_parts(totals: Totals) -> _Parts:
    """The parts of the mean step, in whole ns that sum exactly to it."""
    count, every = max(len(totals.steps_ns), 1), [*totals.parts.values()]
    return dict(zip(totals.parts, divided(every, count, sum(every) // count)))


def divided(values: Sequence[int], divisor: int, whole: int) -> list[int]:
    """Divide integers by `divisor` so that the quotients are integers that sum to `whole`.

    `whole` must be the sum of the values divided by `divisor`, rounded up or down.
    """
    found = [value // divisor for value in values]
    order = sorted(range(len(values)), key=lambda k: -(values[k] % divisor))
    for k in order[: whole - sum(found)]:
        found[k] += 1
    return found


def _steps(steps_ns: Sequence[int]) -> Steps:
    middle = int(median(steps_ns)) if steps_ns else 0
    distances = [abs(each - middle) for each in steps_ns]
    return Steps(
        count=len(steps_ns),
        mean_ns=sum(steps_ns) // max(len(steps_ns), 1),
        median_ns=middle,
        deviation_ns=int(median(distances)) if len(distances) > 2 else None,
    )
