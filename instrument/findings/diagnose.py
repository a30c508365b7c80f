"""`diagnose`: run all checks on the captures of a run, and sort the findings by what they cost.

Several windows and ranks are diagnosed as one run: of the findings with the same code and range in
several captures, the median is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any, NoReturn, cast

from instrument.analysis.find_captures import left_out, newest_run
from instrument.analysis.views import TRAIN, Views
from instrument.errors import CaptureError, TraceError, reason_of
from instrument.findings import (
    allocator_churn,
    attention_not_fused,
    blocking_copies,
    busy_cpus,
    debug_modes,
    device_idle,
    exposed_communication,
    first_step,
    float64,
    garbage_collection,
    graph_breaks,
    launch_bound,
    layout_and_casts,
    loader_wait,
    memory_growth,
    operator_storm,
    recompilation,
    recording_overhead,
    slow_links,
    stragglers,
    synchronizing_calls,
    tensor_cores,
    thread_oversubscription,
    unmarked_time,
    unused_autograd,
)
from instrument.findings.check import Check, NotRecorded, RanksCheck, run_check
from instrument.findings.diagnosis_text import as_markdown, as_text
from instrument.findings.finding import Finding
from instrument.printable import printable
from instrument.runs.rank_summary import RankSummary, summarize
from instrument.runs.run import Run
from instrument.units import counted, few, percent
from instrument.whatif.scenario import Scenario, scenario

#: The checks that `diagnose` runs on each capture. Findings that cost the same keep this order.
CHECKS: tuple[Check, ...] = (
    loader_wait.CHECK,
    synchronizing_calls.CHECK,
    operator_storm.CHECK,
    launch_bound.CHECK,
    device_idle.CHECK,
    blocking_copies.CHECK,
    exposed_communication.CHECK,
    slow_links.CHECK,
    tensor_cores.CHECK,
    float64.CHECK,
    attention_not_fused.CHECK,
    layout_and_casts.CHECK,
    allocator_churn.CHECK,
    recompilation.CHECK,
    graph_breaks.CHECK,
    garbage_collection.CHECK,
    thread_oversubscription.CHECK,
    busy_cpus.CHECK,
    memory_growth.CHECK,
    unused_autograd.CHECK,
    debug_modes.CHECK,
    first_step.CHECK,
    recording_overhead.CHECK,
    unmarked_time.CHECK,
)
#: The checks that `diagnose` runs on the ranks of each window.
RANKS_CHECKS: tuple[RanksCheck, ...] = (stragglers.CHECK,)
# If the ranks cannot be compared, this code stands for all checks in RANKS_CHECKS.
_RANKS = "ranks"
_LONGEST_ERROR = 100


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What slows a run, what to change, and what the change saves.

    Attributes:
        captures: the names of the captures.
        findings: the problems, sorted by the share of the step that the change saves. If the saving
            is unknown, the share that the title names counts. Without both, they come last.
        passed: the codes of the checks that could run on all captures and found nothing.
        not_checked: sentences on what was not checked, and why. If the captures lack something,
            a sentence says how to record it, and names the checks that need it. If no capture has
            device work, one sentence lists the checks that need device work.
        notes: sentences on how far the savings can be trusted.
        step_ns: the median recorded step; of several captures, the median of their medians. None if
            no step could be simulated.
        unexplained: the share of the window in which device work was late for an unknown reason. Of
            several captures, the largest share counts. None if no step could be simulated.
    """

    captures: tuple[str, ...]
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_checked: tuple[str, ...]
    notes: tuple[str, ...] = ()
    step_ns: int | None = None
    unexplained: float | None = None

    def __str__(self) -> str:
        """The text that `instrument diagnose` prints."""
        return as_text(self)

    def __repr__(self) -> str:
        titles = [finding.title for finding in self.findings[:1]]
        found = counted(len(self.findings), "finding")
        return f"<Diagnosis: {', first: '.join([found, *map(printable, titles)])}>"

    def _repr_markdown_(self) -> str:
        """The findings as Markdown, for a notebook."""
        return as_markdown(self)


def diagnose(
    captures: Views | Iterable[Views],
    checks: Iterable[Check] = CHECKS,
    ranks_checks: Iterable[RanksCheck] = RANKS_CHECKS,
) -> Diagnosis:
    """Run the checks on the captures of a run: one capture, or several windows and ranks.

    If there are captures of several runs, only the newest run is diagnosed, and `not_checked` says
    which captures were left out. The diagnosis keeps no capture in memory.

    Args:
        captures: one capture, or several.
        checks: what to look for in each capture.
        ranks_checks: what to look for by comparing the ranks of each window.

    Cost: for each capture, about the time of reading it, plus the time of the simulations.

    Raises:
        CaptureError: there is no capture, or a capture holds no trace.
        TraceError: a trace cannot be read.
    """
    given = [captures] if isinstance(captures, Views) else captures
    newest, older = newest_run(given, lambda capture: capture.about)
    named = [(capture.name, capture.place) for capture in older]
    sentences = filter(None, [left_out(named, [capture.name for capture in newest])])
    one_by_one = (newest.pop(0) for _ in range(len(newest)))
    diagnosis = diagnose_all(one_by_one, checks, ranks_checks)
    return replace(diagnosis, not_checked=(*sentences, *diagnosis.not_checked))


def diagnose_all(
    captures: Iterable[Views],
    checks: Iterable[Check] = CHECKS,
    ranks_checks: Iterable[RanksCheck] = RANKS_CHECKS,
) -> Diagnosis:
    """Diagnose all captures as if they were of one run.

    Captures are read one after the other, so `captures` can be an iterator. The diagnosis says what
    failed, and why:

    - If a check fails with an unexpected error, the check counts as not checked. The other checks
      run.
    - If the simulation fails, the findings have no savings.
    - If the data for the comparison of ranks cannot be computed for a rank, this rank is not
      compared.

    The arguments and the errors are those of `diagnose`.
    """
    seen = Diagnosing(tuple(checks), tuple(ranks_checks))
    for capture in captures:
        seen.add(capture)
    return seen.diagnosis()


@dataclass(slots=True)
class _Problem:
    """One problem: its finding in each capture that has it, and where these are."""

    findings: list[Finding] = field(default_factory=list)
    windows: set[Any] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)


class Diagnosing:
    """The results of the checks for the captures so far."""

    def __init__(
        self,
        checks: tuple[Check, ...] = CHECKS,
        ranks_checks: tuple[RanksCheck, ...] = RANKS_CHECKS,
    ) -> None:
        self.checks, self.ranks_checks = checks, ranks_checks
        self.captures: list[str] = []
        self.problems: dict[tuple[str, str | None, int], _Problem] = {}
        # The number of captures, by remedy (or else message), then by code and what is missing.
        self.missing: dict[str, dict[tuple[str, str], int]] = {}
        self.passed: set[str] = set()
        self.has_device_work = False
        self.runs: dict[tuple[Any, int | None], int] = {}  # captures by steps and rank
        self.summaries: list[tuple[Path | str, RankSummary]] = []
        self.notes: dict[str, None] = {}
        self.steps_ns: list[int] = []
        self.unexplained: float | None = None

    def add(self, capture: Views) -> None:
        """Run the checks of one capture.

        Raises:
            CaptureError: the capture holds no trace.
            TraceError: the trace cannot be read.
        """
        capture.events  # noqa: B018 - raises if the capture holds no trace
        self.captures.append(capture.name)
        self.has_device_work |= len(capture.work.event) > 0
        window, rank = self._window(capture)
        whatif = self._scenario(capture)
        for check in self.checks:
            find = partial(run_check, check, capture, whatif)
            self._keep(check.code, find, capture.phase, window, rank, capture.name)
        world_size = capture.about.world_size or capture.events.world_size or 1
        place = capture.url or capture.folder or capture.trace_path
        if world_size > 1 and place is not None and self.ranks_checks:
            with self._noting(_RANKS, "The summary of a rank"):
                self.summaries.append((place, summarize(capture)))

    def _compare_ranks(self) -> None:
        """Run the checks that compare the ranks of each window."""
        with self._noting(_RANKS, "The comparison of the ranks"):
            windows = [ranks for ranks in Run(self.summaries).windows if len(ranks.summaries) > 1]
            for ranks in windows:
                phase = ranks.summaries[0].phase or TRAIN
                for check in self.ranks_checks:
                    self._keep(check.code, partial(check.find, ranks), phase, ranks.where)
            if self.summaries and not windows:
                message = "The ranks were not compared: give the captures of all ranks of a window."
                self.missing[message] = {(_RANKS, ""): len(self.captures)}

    def _keep(
        self,
        code: str,
        find: Callable[[], Iterator[Finding]],
        phase: str,
        window: Any,
        rank: int | None = None,
        capture: str | None = None,
    ) -> None:
        """Add the findings of one check in one capture or window."""
        numbers: dict[str | None, int] = {}
        with self._noting(code, f"The check {code}"):
            for found in find():
                finding = replace(found, capture=capture, phase=phase)
                number = numbers[finding.range] = numbers.get(finding.range, -1) + 1
                key = finding.code, finding.range, number
                problem = self.problems.setdefault(key, _Problem())
                problem.findings.append(finding)
                problem.windows.add(window)
                if rank is not None:
                    problem.ranks.add(rank)
            self.passed.add(code)

    @contextmanager
    def _noting(self, code: str, what: str) -> Iterator[None]:
        """A context manager: note an error of its block in `missing`, and do not raise the error.

        Two types of errors are not noted, but raised.

        Raises:
            TraceError: the trace cannot be read.
            MemoryError: there is not enough memory.
        """
        try:
            yield
        except Exception as error:
            failure = _failure(what, error)
            remedy, missing = str(failure), ""
            if isinstance(failure, NotRecorded):
                remedy, missing = failure.remedy, failure.missing
            counts = self.missing.setdefault(remedy, {})
            counts[code, missing] = counts.get((code, missing), 0) + 1

    def _window(self, capture: Views) -> tuple[Any, int | None]:
        """The window and the rank of a capture.

        A rank records a window once. So if the same steps on the same rank occur again, they are
        from another run, and count as another window.
        """
        about = capture.about
        rank = capture.events.rank if about.rank is None else about.rank
        steps = about.window.phase, about.window.first_step
        again = self.runs.get((steps, rank), 0)
        self.runs[steps, rank] = again + 1
        return (*steps, again), rank

    def _scenario(self, capture: Views) -> Scenario:
        try:
            whatif = scenario(capture)
            self.steps_ns.append(whatif.baseline_ns)
            self.unexplained = max(self.unexplained or 0.0, whatif.unexplained)
            self.notes.update(dict.fromkeys(whatif.notes))
        except Exception as error:
            failure = _failure("The simulation", error)
            self.notes[f"No saving is known: {failure}"] = None
            return cast("Scenario", _Refused(failure))
        return whatif

    def diagnosis(self) -> Diagnosis:
        """The diagnosis of all captures so far.

        Raises:
            CaptureError: there is no capture.
        """
        if not self.captures:
            raise CaptureError("There is nothing to diagnose: give at least one capture.")
        self._compare_ranks()
        findings = [self._with_place(problem) for problem in self.problems.values()]
        silent = self.passed.difference(
            (code for code, _, _ in self.problems),
            (code for counts in self.missing.values() for code, _ in counts),
        )
        without = set()
        if not self.has_device_work:
            without = silent & {check.code for check in self.checks if check.on_device}
        codes = [
            *(check.code for check in self.checks),
            *(check.code for check in self.ranks_checks),
        ]
        return Diagnosis(
            captures=tuple(self.captures),
            findings=tuple(sorted(findings, key=_cost, reverse=True)),
            passed=tuple(code for code in codes if code in silent - without),
            not_checked=(
                *_not_seen([code for code in codes if code in without]),
                *self._not_checked(),
            ),
            notes=tuple(self.notes),
            step_ns=median_low(self.steps_ns) if self.steps_ns else None,
            unexplained=self.unexplained,
        )

    def _with_place(self, problem: _Problem) -> Finding:
        """The median finding of a problem, with its windows, ranks and spread in the title.

        The finding's phase is None if all captures are of one phase.
        """
        facts = []
        of_windows = len(
            {(*steps, again) for (steps, _), count in self.runs.items() for again in range(count)}
        )
        if of_windows > 1:
            facts.append(f"in {len(problem.windows)} of {of_windows} windows")
        of_ranks = len({rank for _, rank in self.runs if rank is not None})
        if of_ranks > 1 and problem.ranks:
            facts.append(_ranks(sorted(problem.ranks), of_ranks))
        found = _median(problem.findings)
        shares = [each.share for each in problem.findings if each.share is not None]
        spread = dict.fromkeys(map(percent, (min(shares), max(shares)))) if shares else {}
        # The share of `unmarked-time` is not always that of the title.
        if len(spread) > 1 and percent(found.share or 0) in found.title:
            facts.append(" to ".join(spread))
        where = f" ({', '.join(facts)})" if facts else ""
        phases = {phase or TRAIN for (phase, _), _ in self.runs}
        return replace(
            found, title=found.title + where, phase=found.phase if len(phases) > 1 else None
        )

    def _not_checked(self) -> Iterator[str]:
        """One sentence for each remedy, with the codes of the checks that need it.

        For a failure without a remedy, the sentence is the failure's message.
        """
        of = len(self.captures)
        for remedy, counts in self.missing.items():
            captures: dict[str, int] = {}
            for (code, _), count in counts.items():
                captures[code] = captures.get(code, 0) + count
            reasons = {missing for _, missing in counts}
            message = remedy
            if reasons != {""}:
                *most, last = captures
                codes = f"{', '.join(most)} and {last}" if most else last
                because = f" ({reasons.pop()})" if len(reasons) == 1 else ""
                message = f"To check {codes}, {remedy}{because}."
            count = max(captures.values())
            yield message if count == of else f"{message} ({count} of {of} captures)"


class _Refused:
    """Replaces `capture.whatif` if the simulation failed.

    Each use of this object raises a CaptureError that says why the simulation failed.
    """

    def __init__(self, error: CaptureError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise CaptureError(*self._error.args)


def _failure(what: str, error: Exception) -> CaptureError:
    """Return an error that says why a part of a diagnosis failed; `error` is the cause.

    If `error` is a CaptureError, it is returned as it is.

    Raises:
        TraceError, MemoryError: `error` has one of these types, and is raised as it is.
    """
    if isinstance(error, CaptureError):
        return error
    if isinstance(error, (TraceError, MemoryError)):
        raise error
    kind, said = type(error).__name__, reason_of(error)
    said = said if len(said) <= _LONGEST_ERROR else f"{said[: _LONGEST_ERROR - 1]}…"
    why = kind if said == kind else f"{kind}: {said}"
    return CaptureError(f"{what} failed on this capture ({why}): please report it.")


def _not_seen(codes: list[str]) -> list[str]:
    """A list of one sentence on the checks that need device work; [] if `codes` is empty."""
    sentence = "Without device work, these problems do not occur or cannot be seen"
    return [f"{sentence}: {', '.join(codes)}."] if codes else []


def _cost(finding: Finding) -> float:
    """The share of the step that a finding saves; if it is unknown, the share in its title."""
    if finding.saving is not None:
        return finding.saving.share
    return float("-inf") if finding.share is None else finding.share


def _median(findings: list[Finding]) -> Finding:
    """The finding with the median saving, or share if no saving is known; of two, the smaller."""
    known = [each for each in findings if each.saving is not None]
    return sorted(known or findings, key=_cost)[(len(known or findings) - 1) // 2]


def _ranks(numbers: list[int], of: int) -> str:
    if len(numbers) == of:
        return f"on all {of} ranks"
    return f"on rank{'s'[: len(numbers) > 1]} {few(numbers)}"
