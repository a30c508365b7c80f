"""One side of a comparison: the sums and the conditions of all its captures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Protocol, TypeAlias

from instrument.base.errors import CaptureError, TraceError
from instrument.read.compare.counters import counters
from instrument.read.compare.sums import Samples, Sums, added, sums_of
from instrument.read.compare.unlike import Conditions, conditions, joined
from instrument.read.views.find_captures import (
    NewestRun,
    Place,
    captures_at,
    of_newest_run,
    place_of,
)
from instrument.read.views.private_words import private_words, words_of_path
from instrument.read.views.views import TRAIN, Views

if TYPE_CHECKING:
    from instrument.read.compare.limits import Condition, Window


class Recorded(Protocol):
    """Several captures with one name: a run, or one window of a run."""

    @property
    def name(self) -> str:
        """The name of the run or window."""

    @property
    def paths(self) -> Sequence[Place]:
        """The captures."""


#: What can be compared: a capture, a run, one window of a run, or the path or URL of one of them.
Comparable: TypeAlias = "str | PathLike[str] | Views | Recorded"
#: Several of them are samples of one side; three on each side give intervals.
Comparables: TypeAlias = "Comparable | list[Comparable] | tuple[Comparable, ...]"


@dataclass
class Side:
    """The captures of one side.

    Attributes:
        name: the capture, run or path that the user gave, as text.
        sums: by phase (such as training), number of the sample, and rank, the sums of all windows.
        conditions: the conditions of each phase.
        notes: a sentence for each capture that could not be read or whose trace is cut short, and
            a sentence that names the captures of older runs.
        private: the words in these captures that a redacted report must hide.
        windows: what conditions judge, by whether the phase is not training, and by rank.
        steps: the first and the last step of each capture to compare; None compares all.
        limits: the conditions to judge; without any, `windows` is empty.
    """

    name: str
    sums: dict[tuple[str, int, int | None], Sums] = field(default_factory=dict)
    conditions: dict[str, Conditions] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    private: set[str] = field(default_factory=set)
    windows: dict[tuple[bool, int], list[Window]] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    limits: Sequence[Condition] = ()

    def add(self, capture: Views, sample: int = 0) -> None:
        """Add the sums, the conditions and the window of one capture."""
        capture.require_whole("A comparison")
        capture = capture if self.steps is None else capture.during(steps=self.steps)
        phase, counted = capture.phase, counters(capture)
        own, place = sums_of(capture, counted), (phase, sample, capture.rank)
        if self.limits:
            from instrument.read.compare.limits import window_of

            window = window_of(capture, counted, self.limits, own)
            self.windows.setdefault((phase != TRAIN, capture.rank or 0), []).append(window)
        self.sums[place] = added([self.sums[place], own]) if place in self.sums else own
        known = [self.conditions[phase]] if phase in self.conditions else []
        self.conditions[phase] = joined([*known, conditions(capture)])
        self.private.update(private_words(capture))
        if capture.events.cut_short:
            self.notes.append(f"The trace of {capture.name} is cut short.")

    @property
    def judged(self) -> list[Window]:
        """The windows that conditions judge: those of training, or else of the other phases.

        Of several ranks, only the lowest counts, because the times of several ranks in one window
        are not independent.
        """
        return self.windows[min(self.windows)]

    def ranks(self, phase: str) -> list[int | None]:
        """The ranks that recorded a phase, in the order in which they were read."""
        return [*dict.fromkeys(rank for name, _, rank in self.sums if name == phase)]

    def samples(self, phase: str, ranks: Sequence[int | None]) -> Samples:
        """The samples of one phase, over some ranks."""
        found: dict[int, list[Sums]] = {}
        for (name, sample, rank), sums in self.sums.items():
            if name == phase and rank in ranks:
                found.setdefault(sample, []).append(sums)
        return Samples.of([added(each) for each in found.values()])


def load(
    given: Comparables | Side,
    steps: tuple[int, int] | None = None,
    limits: Sequence[Condition] = (),
) -> Side:
    """Load and sum the captures of one side, one after the other; a `Side` is returned as it is.

    `steps` are the first and the last step of each capture to compare; None compares all. `limits`
    are conditions that `Side.judged` answers.

    Of a folder with several runs, only the newest run is loaded. `notes` names the captures of
    older runs, and those that cannot be read.

    Raises:
        CaptureError: there are no captures, or none can be read.
        ConfigError: a capture has none of the steps, or a query cannot be answered.
        TraceError: no trace can be read.
    """
    if isinstance(given, Side):
        return given
    listed = list(given) if isinstance(given, list | tuple) else [given]
    if not listed:
        raise CaptureError("A side of the comparison is empty: give at least one capture.")
    names = [str(place_of(each)) if isinstance(each, str | PathLike) else each.name
             for each in listed]  # fmt: skip
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    side = Side(f"{names[0]}{more}", steps=steps, limits=limits)
    for sample, (each, name) in enumerate(zip(listed, names)):
        _add(side, each, name, sample)
    return side


def _add(side: Side, given: Comparable, name: str, sample: int) -> None:
    if isinstance(given, Views):
        side.add(given, sample)
        return
    if isinstance(given, str | PathLike):
        run = of_newest_run(captures_at(place_of(given), or_traces=True))
    else:
        run = NewestRun([*given.paths], [], "")
    unread = 0
    for path in run.captures:
        try:
            side.add(Views.load(path), sample)
        except (CaptureError, TraceError) as error:
            side.private.update(words_of_path(path))
            side.notes.append(f"Left out: {error}")
            unread += 1
            if unread == len(run.captures):
                raise
    if run.left_out:
        side.notes.append(f"{name}: {run.left_out}")
        side.private.update(word for path in run.older for word in words_of_path(path))


def common_phase(before: Side, after: Side) -> str:
    """The phase to compare: training if both sides have it, else the first common phase.

    Raises:
        CaptureError: no phase was recorded on both sides.
    """
    common = [phase for phase in before.conditions if phase in after.conditions]
    if not common:
        was, now = (", ".join(side.conditions) for side in (before, after))
        raise CaptureError(
            f"{before.name} and {after.name} cannot be compared: the phase is {was} before and "
            f"{now} after. Give captures of the same phase."
        )
    return TRAIN if TRAIN in common else common[0]


def left_out(before: Side, after: Side, phase: str) -> Iterator[str]:
    """Yield sentences on left-out captures and phases, and on different numbers of ranks."""
    yield from before.notes
    yield from after.notes
    phases = sorted({*before.conditions, *after.conditions} - {phase})
    if phases:
        yield f"Only the phase {phase} is compared; left out: {', '.join(phases)}."
    was, now = (len(side.ranks(phase)) for side in (before, after))
    if was != now:
        yield f"The number of ranks differs: {was} before, {now} after."
