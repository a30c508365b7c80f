"""`diagnose`: run all checks on the captures of a run, and sort what they find by its saving.

Several windows and ranks are diagnosed as one run. Equal findings of several captures, with the
same code and range, become one: the finding with the largest saving. Its title says where else it
was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from instrument.errors import CaptureError
from instrument.findings import (
    loader_wait,
    operator_storm,
    synchronizing_calls,
    unmarked_time,
)
from instrument.findings.finding import Check, Finding, NotRecorded

if TYPE_CHECKING:
    from instrument.capture import Capture
    from instrument.whatif.scenario import Scenario

#: Every kind of problem that `diagnose` looks for.
CHECKS: tuple[Check, ...] = (
    loader_wait.CHECK,
    synchronizing_calls.CHECK,
    operator_storm.CHECK,
    unmarked_time.CHECK,
)
_FEW = 8


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What slows a run, what to change, and what the change saves.

    Attributes:
        captures: the names of the captures.
        findings: the problems, the largest saving first; those with an unknown saving come last.
        passed: a sentence for each kind of problem that no capture has.
        not_checked: a sentence for each check that could not run, with what to record for it.
        notes: sentences on how far the savings can be trusted.
        step_ns: the simulated step without changes, of the capture with the longest one; None if
            no step could be simulated.
    """

    captures: tuple[str, ...]
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_checked: tuple[str, ...]
    notes: tuple[str, ...] = ()
    step_ns: int | None = None


def diagnose(captures: Iterable[Capture], checks: Iterable[Check] = CHECKS) -> Diagnosis:
    """Run the checks on the captures of a run: one capture, or several windows and ranks.

    Captures are read one after the other, so an iterator over them needs the memory of one.

    Cost: for each capture about as much as reading it, and what the simulations take.

    Raises:
        CaptureError: there is no capture, or one holds no trace.
        TraceError: a trace cannot be read.
    """
    seen = _Seen(tuple(checks))
    for capture in captures:
        seen.add(capture)
    if not seen.captures:
        raise CaptureError("There is nothing to diagnose: give at least one capture.")
    return seen.diagnosis()


@dataclass(slots=True)
class _Place:
    """One problem over the captures: its largest finding, and where it was found."""

    largest: Finding
    windows: set[Any] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)


class _Seen:
    """What the checks have said of the captures so far."""

    def __init__(self, checks: tuple[Check, ...]) -> None:
        self.checks = checks
        self.captures: list[str] = []
        self.places: dict[tuple[str, str | None, int], _Place] = {}
        self.found: set[str] = set()
        self.missing: dict[str, dict[str, int]] = {}  # by code and message, how many captures
        self.windows: dict[tuple[Any, int | None], int] = {}
        self.notes: dict[str, None] = {}
        self.step_ns: int | None = None

    def add(self, capture: Capture) -> None:
        self.captures.append(capture.name)
        window, rank = self._window(capture)
        whatif = self._scenario(capture)
        for check in self.checks:
            numbers: dict[str | None, int] = {}
            try:
                for finding in check.find(capture, whatif):
                    number = numbers[finding.range] = numbers.get(finding.range, -1) + 1
                    self._keep(finding, number, window, rank)
            except (NotRecorded, CaptureError) as error:
                counts = self.missing.setdefault(check.code, {})
                counts[str(error)] = counts.get(str(error), 0) + 1

    def _keep(self, finding: Finding, number: int, window: Any, rank: int | None) -> None:
        self.found.add(finding.code)
        key = finding.code, finding.range, number
        place = self.places.setdefault(key, _Place(finding))
        if _saving_ns(finding) > _saving_ns(place.largest):
            place.largest = finding
        place.windows.add(window)
        if rank is not None:
            place.ranks.add(rank)

    def _window(self, capture: Capture) -> tuple[Any, int | None]:
        """The window and the rank of a capture.

        A rank records a window once. So the same steps on the same rank are those of another run,
        which count as another window.
        """
        about = capture.about
        rank = capture.events.rank if about.rank is None else about.rank
        steps = about.window.phase, about.window.first_step
        again = self.windows.get((steps, rank), 0)
        self.windows[steps, rank] = again + 1
        return (*steps, again), rank

    def _scenario(self, capture: Capture) -> Scenario:
        try:
            whatif: Scenario = capture.whatif
            self.step_ns = max(self.step_ns or 0, round(whatif.baseline_ns))
            self.notes.update(dict.fromkeys(whatif.notes))
        except CaptureError as error:
            self.notes[f"No saving is known: {error}"] = None
            return cast("Scenario", _Refused(error))
        return whatif

    def diagnosis(self) -> Diagnosis:
        findings = [self._told(place) for place in self.places.values()]
        return Diagnosis(
            captures=tuple(self.captures),
            findings=tuple(sorted(findings, key=_saving_ns, reverse=True)),
            passed=tuple(
                check.passed
                for check in self.checks
                if check.code not in self.found and check.code not in self.missing
            ),
            not_checked=tuple(self._not_checked()),
            notes=tuple(self.notes),
            step_ns=self.step_ns,
        )

    def _told(self, place: _Place) -> Finding:
        """The largest finding of a place, with the windows and ranks in its title."""
        facts = []
        windows = len(set(self._every_window()))
        if windows > 1:
            facts.append(f"in {len(place.windows)} of {windows} windows")
        ranks = {rank for _, rank in self.windows if rank is not None}
        if len(ranks) > 1:
            facts.append(_ranks(sorted(place.ranks), len(ranks)))
        where = f" ({', '.join(facts)})" if facts else ""
        return replace(place.largest, title=place.largest.title + where)

    def _every_window(self) -> Iterator[Any]:
        for (steps, _), runs in self.windows.items():
            for again in range(runs):
                yield (*steps, again)

    def _not_checked(self) -> Iterator[str]:
        for messages in self.missing.values():
            for message, count in messages.items():
                of = len(self.captures)
                yield message if count == of else f"{message} ({count} of {of} captures)"


class _Refused:
    """Stands for the simulation of a capture that cannot be simulated: each edit raises why."""

    def __init__(self, error: CaptureError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise CaptureError(*self._error.args)


def _saving_ns(finding: Finding) -> float:
    return float("-inf") if finding.saving is None else finding.saving.saving_ns


def _ranks(numbers: list[int], of: int) -> str:
    if len(numbers) == of:
        return f"on all {of} ranks"
    more = f" and {len(numbers) - _FEW} more" if len(numbers) > _FEW else ""
    return f"on rank{'s'[: len(numbers) > 1]} {', '.join(map(str, numbers[:_FEW]))}{more}"
