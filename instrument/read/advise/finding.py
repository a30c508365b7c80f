"""`Finding`: a problem, its evidence, what to change, and the step time that the change saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from instrument.read.facts.kernel_names import kernel_labels


class Evidence(NamedTuple):
    """Events of one name that show a problem; the attributes are the keys of the JSON."""

    name: str
    calls: int
    total_ns: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    detail: str = ""
    is_kernel: bool = False  # whether `name` is that of device work; not in the JSON

    @property
    def span(self) -> tuple[int, int] | None:
        """The start and the end of the longest event; None if they are not known."""
        if self.start_ns is None or self.end_ns is None:
            return None
        return self.start_ns, self.end_ns


def labels_of(rows: Sequence[Evidence]) -> list[str]:
    """Return what texts show for the names of rows: for kernels their labels."""
    labels = kernel_labels(row.name for row in rows if row.is_kernel)
    return [labels[row.name] if row.is_kernel else row.name for row in rows]


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
    """A problem in a capture; the attributes are the keys of the JSON, except for these two.

    Attributes:
        saving: the figures of the simulated change; None if it cannot be simulated.
        variant: which of the check's problems it is, such as "casts tensors" of `layout-and-casts`;
            empty if the check looks for one problem.
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
