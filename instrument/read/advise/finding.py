"""`Finding`: a problem, its evidence, what to change, and the step time that the change saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Evidence(NamedTuple):
    """Events of one name that show a problem, as one table row.

    Attributes:
        name: the name of the events, such as "aten::item".
        calls: how often the events occurred in the window.
        total_ns: the time of the events in the window; None if this time has no meaning.
        start_ns, end_ns: the start and end of the longest event, on the trace's own clock; None if
            the row stands for no event of the trace.
        detail: further facts, such as a size or a shape; empty if there are none.
    """

    name: str
    calls: int
    total_ns: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    detail: str = ""

    @property
    def span(self) -> tuple[int, int] | None:
        """The start and the end of the longest event; None if they are not known."""
        if self.start_ns is None or self.end_ns is None:
            return None
        return self.start_ns, self.end_ns


class Saving(NamedTuple):
    """What a change saves according to the simulation, in nanoseconds.

    Attributes:
        baseline_ns: the mean of the recorded steps that count.
        saving_ns: how much shorter a step is with the change; negative if it is longer.
        low_ns, high_ns: the bounds of `saving_ns`.
    """

    baseline_ns: int
    saving_ns: int
    low_ns: int
    high_ns: int

    @property
    def step_ns(self) -> int:
        """How long a step takes with the change."""
        return self.baseline_ns - self.saving_ns

    @property
    def share(self) -> float:
        """The part of the step that is saved."""
        return self.saving_ns / max(self.baseline_ns, 1)

    @property
    def is_wide(self) -> bool:
        """Whether the lower bound is less than half of the upper one."""
        return 2 * max(self.low_ns, 0) < self.high_ns

    @property
    def bounds(self) -> tuple[Saving, Saving]:
        """The savings that the bounds are."""
        return self._replace(saving_ns=self.low_ns), self._replace(saving_ns=self.high_ns)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in a capture.

    Attributes:
        code: the kind of the problem, such as "loader-wait". The file in `advise/` that finds the
            problem has the same name with underscores.
        title: the problem in one sentence, with a number, such as "80 % of the step waits for
            data".
        change: what to write, as a sentence or a line of PyTorch.
        verify: how to check that the change helped. Usually, it is a shell command: run it for this
            capture, and for a capture of the changed program. Else it is a sentence.
        saving: how much shorter a simulated step is without the problem; None if it cannot be
            simulated.
        range: the path of the range where the problem is; None if the problem is in no range, or in
            several.
        source: the file and line, such as "train.py:31"; None if the line is not known, or if there
            are several.
        evidence: the events that show the problem, the most important first.
        coverage: the rows of `capture.coverage` that the finding depends on.
        share: the share of the step, or of the window, that the title names; None if the title
            names none. For `unmarked-time`, it is the share in no range and no operator; None with
            device work.
        variant: which of the check's problems it is, such as "casts tensors" of `layout-and-casts`;
            empty if the check looks for one problem.
        ends_run: whether the run soon fails because of the problem.
        is_caveat: whether the problem makes the recording less exact instead of the program slower.
        assumes: what the saving assumes, such as "with half of this time"; empty if it assumes that
            the problem is gone.
        capture: the name of the capture that holds the evidence; None for a comparison of ranks.
            `diagnose` sets it.
        phase: the phase of the step that the saving shortens, such as "validation"; None if all
            captures are of one phase. `diagnose` sets it.
    """

    code: str
    title: str
    change: str
    verify: str
    saving: Saving | None = None
    range: str | None = None
    source: str | None = None
    evidence: tuple[Evidence, ...] = ()
    coverage: tuple[str, ...] = ()
    share: float | None = None
    variant: str = ""
    ends_run: bool = False
    is_caveat: bool = False
    assumes: str = ""
    capture: str | None = None
    phase: str | None = None

    def spans_in(self, capture: str) -> list[tuple[int, int] | None]:
        """The span of each item of evidence; None where it is not in the capture of this name."""
        is_here = self.capture in (None, capture)
        return [row.span if is_here else None for row in self.evidence]
