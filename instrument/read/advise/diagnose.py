"""`diagnose`: run all checks on the captures of a run, and sort the findings by what they cost.

Several windows and ranks are diagnosed as one run: of the findings with the same code, range and
phase in several captures, the median is shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from instrument.base.errors import CaptureError, TraceError, reason_of
from instrument.base.prose import shortened
from instrument.base.step_times import kinds_in_words
from instrument.base.units import counted, duration, few, percent
from instrument.read.advise import (
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
    not_training,
    one_time_costs,
    operator_storm,
    python_time,
    recompilation,
    recording_overhead,
    slow_links,
    stragglers,
    synchronizing_calls,
    tensor_cores,
    thread_oversubscription,
    unmarked_time,
    unused_autograd,
    unused_gradients,
)
from instrument.read.advise.check import QUIET_CPUS, Check, NotRecorded, RanksCheck, run_check
from instrument.read.advise.diagnosis import Diagnosis
from instrument.read.advise.finding import Finding
from instrument.read.simulate.scenario import Scenario, scenario
from instrument.read.views.coverage import lost_events
from instrument.read.views.device_use import device_use
from instrument.read.views.find_captures import left_out, newest_run
from instrument.read.views.largest_parts import largest_parts
from instrument.read.views.views import TRAIN, Views

if TYPE_CHECKING:
    from instrument.read.ranks.rank_summary import RankSummary

#: The checks that `diagnose` runs on each capture. Findings that cost the same keep this order.
CHECKS: tuple[Check, ...] = (
    loader_wait.CHECK,
    synchronizing_calls.CHECK,
    operator_storm.CHECK,
    one_time_costs.CHECK,
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
    unused_gradients.CHECK,
    debug_modes.CHECK,
    first_step.CHECK,
    recording_overhead.CHECK,
    not_training.CHECK,
    python_time.CHECK,
    unmarked_time.CHECK,
)
#: The checks that `diagnose` runs on the ranks of each window.
RANKS_CHECKS: tuple[RanksCheck, ...] = (stragglers.CHECK,)
# If the ranks cannot be compared, this code stands for all checks in RANKS_CHECKS.
_RANKS = "ranks"
# The checks whose time may be a wait for a late rank.
_LATE = stragglers.CHECK.code
_COMMUNICATION = (exposed_communication.CHECK.code, slow_links.CHECK.code)
_EVEN_FIRST = "Give the ranks equally much work first: to send less does not shorten their waits."
_COMPARE_FIRST = (
    "First give the captures of all ranks to `instrument diagnose`, which shows whether they wait "
    "for a late one: to send less does not shorten such a wait."
)
_LONGEST_ERROR, _LONGEST_PHASE = 100, 44
# The captures' mean steps differ if the largest is this many times the smallest.
_DIFFER = 1.2


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
    if isinstance(captures, Views):
        return diagnose_all([captures], checks, ranks_checks)
    newest, older = newest_run(captures, lambda capture: capture.about)
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
    """Diagnose all captures as if they were of one run; they are read one after the other.

    A check that fails counts as not checked, and the other checks run. If the simulation fails, no
    saving is known. A rank whose summary fails is not compared. The arguments and the errors are
    those of `diagnose`.
    """
    seen = Diagnosing(tuple(checks), tuple(ranks_checks))
    for capture in captures:
        seen.add(capture)
    return seen.diagnosis


class _Found(NamedTuple):
    """A finding in one window; `rank` is None for a comparison of ranks."""

    finding: Finding
    window: Any
    rank: int | None


class _Placed(NamedTuple):
    """The finding of a problem in all windows.

    Attributes:
        is_common: whether at least half of the windows of its phase have the problem.
        follows_late: whether late ranks are its cause, or only late ranks have it.
    """

    finding: Finding
    is_common: bool
    follows_late: bool


class Diagnosing:
    """The results of the checks for the captures so far."""

    def __init__(
        self,
        checks: tuple[Check, ...] = CHECKS,
        ranks_checks: tuple[RanksCheck, ...] = RANKS_CHECKS,
    ) -> None:
        self.checks, self.ranks_checks = checks, ranks_checks
        self.captures: list[str] = []
        # By code, variant, range, phase, and number among the findings of a capture with all these.
        self.problems: dict[tuple[Any, ...], list[_Found]] = defaultdict(list)
        # The number of captures, by remedy (or else message), then by code and what is missing.
        self.missing: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self.passed: set[str] = set()
        self.has_device_work = self.has_steps = False
        self.runs: Counter[tuple[Any, int | None]] = Counter()  # captures by steps and rank
        self.summaries: list[tuple[Path | str, RankSummary]] = []
        self.compared: set[str] = set()  # the phases with a window of all ranks
        # by phase, the ranks that others wait for; none if these differ
        self.late: dict[str, set[int | None]] = defaultdict(set)
        self.notes: Counter[str] = Counter()
        # By phase: how long a step takes, the kinds of steps, what the device does, the largest
        # parts, and the rank (-1: unknown).
        self.steps_ns: dict[str, list[tuple[int, str, str, str, int]]] = defaultdict(list)
        self.unexplained: list[float] = []
        self.lost: dict[str, str] = {}  # sentences on lost events, by capture
        # What the device does and the largest parts, in the first capture without a simulation.
        self.unsimulated: tuple[str, str] | None = None

    def add(self, capture: Views) -> bool:
        """Run the checks of one capture; without a trace, only compare its rank, and return False.

        Raises:
            CaptureError: the capture holds no trace, and no summary of a rank.
            TraceError: the trace cannot be read.
        """
        from instrument.read.ranks.rank_summary import summarize, without_trace

        place = capture.place
        if place is not None and (summary := without_trace(capture)):
            self.summaries.append((place, summary))
            return False
        capture.events  # noqa: B018 - raises if the capture holds no trace
        self.captures.append(capture.name)
        self.has_device_work |= len(capture.work.event) > 0
        self.has_steps |= len(capture.links.steps) > 0
        if lost := lost_events(capture):
            self.lost.setdefault(capture.name, lost)
        about, whatif = capture.about, self._scenario(capture)
        rank, steps = capture.rank, (about.window.phase, about.window.first_step)
        # The same steps of the same rank again are of another run, and count as another window.
        window = (*steps, self.runs[steps, rank])
        self.runs[steps, rank] += 1
        for check in self.checks:
            find = partial(run_check, check, capture, whatif)
            self._keep(check.code, find, window, capture.phase, rank, capture.name)
        world_size = about.world_size or capture.events.world_size or 1
        is_of_several = world_size > 1 or capture.given_rank is not None
        if is_of_several and place is not None and self.ranks_checks:
            with self._noting(_RANKS, "The summary of a rank"):
                self.summaries.append((place, summarize(capture)))
        return True

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The diagnosis of all captures, with a comparison of the ranks; add no capture after it.

        Raises:
            CaptureError: there is no capture with a trace.
        """
        if not self.captures:
            raise CaptureError("There is no trace to diagnose: give a capture that holds one.")
        self._compare_ranks()
        self._doubt_cost_of_recording()
        placed = [self._with_place(found) for found in self.problems.values()]
        findings = sorted(placed, key=_rank, reverse=True)
        codes = [each.code for each in self.checks] + [each.code for each in self.ranks_checks]
        silent = self.passed.difference(
            (code for code, *_ in self.problems),
            (code for counts in self.missing.values() for code, _ in counts),
        )
        not_seen = []
        if not self.has_device_work:
            not_seen = [each.code for each in self.checks if each.on_device and each.code in silent]
        of = len(self.captures)
        phase = TRAIN if TRAIN in self.steps_ns else next(iter(self.steps_ns), TRAIN)
        steps = self.steps_ns.get(phase, [])
        nothing = None, "", *(self.unsimulated or ("", "")), -1
        step_ns, kinds, *sentences, rank = median_low(steps) if steps else nothing
        if rank >= 0 and len({rank for _, rank in self.runs}) > 1:
            sentences = [text and f"On rank {rank}: {text}" for text in sentences]
        device_uses, parts = sentences
        between = _range(steps)
        return Diagnosis(
            captures=tuple(self.captures),
            findings=tuple(_causes_first(findings)),
            passed=tuple(code for code in codes if code in silent.difference(not_seen)),
            not_checked=tuple(self._not_checked(not_seen)),
            notes=tuple(_of_captures(note, n, of) for note, n in self.notes.items()),
            step_ns=step_ns,
            step_phase=phase if len({at or TRAIN for (at, _), _ in self.runs}) > 1 else None,
            step_kinds=kinds,
            between_ns=between if between[1] >= _DIFFER * between[0] else None,
            has_steps=self.has_steps,
            unexplained=max(self.unexplained, default=None),
            largest_parts=parts,
            device_use=device_uses,
            lost_events=" ".join(
                f"{name}: {lost}" if of > 1 else lost for name, lost in [*self.lost.items()][:1]
            ),
        )

    def _doubt_cost_of_recording(self) -> None:
        """Blame no recording for long steps if windows differ as much from each other."""
        least, code = 1 + recording_overhead.LEAST_EXCESS, recording_overhead.CHECK.code
        for key in [key for key in self.problems if key[0] == code]:
            low, high = _range(self.steps_ns[key[3]])
            if high >= least * low:
                missing = f"windows differ: a step takes {duration(low)} to {duration(high)}"
                self.missing[QUIET_CPUS][code, missing] += len(self.problems.pop(key))

    def _compare_ranks(self) -> None:
        """Run the checks that compare the ranks of each window."""
        if not self.summaries:
            return
        from instrument.read.ranks.run import Run

        with self._noting(_RANKS, "The comparison of the ranks"):
            windows = [ranks for ranks in Run(self.summaries).windows if len(ranks.summaries) > 1]
            for ranks in windows:
                phase = ranks.summaries[0].phase or TRAIN
                if len(ranks.summaries) >= (ranks.world_size or 0):
                    self.compared.add(phase)
                for check in self.ranks_checks:
                    self._keep(check.code, partial(check.find, ranks), ranks.where, phase)
                if any(at[0] == _LATE and at[3] == phase for at in self.problems):
                    self.late[phase].update(ranks.stragglers.column("rank"))
            if not windows:
                message = "The ranks were not compared: give the captures of all ranks of a window."
                self.missing[message][_RANKS, ""] = len(self.captures)

    def _keep(
        self,
        code: str,
        find: Callable[[], Iterator[Finding]],
        window: Any,
        phase: str,
        rank: int | None = None,
        capture: str | None = None,
    ) -> None:
        """Add the findings of one check in one capture or window."""
        number: Counter[tuple[Any, ...]] = Counter()
        with self._noting(code, f"The check {code}"):
            for finding in find():
                key = finding.code, finding.variant, finding.range, phase
                named = replace(finding, capture=capture, phase=phase)
                self.problems[*key, number[key]].append(_Found(named, window, rank))
                number[key] += 1
            self.passed.add(code)

    @contextmanager
    def _noting(self, code: str, what: str) -> Iterator[None]:
        """Note an error in `missing` instead of raising it; see `_failure`."""
        try:
            yield
        except NotRecorded as error:
            self.missing[error.remedy][code, error.missing] += 1
        except Exception as error:
            self.missing[_failure(what, error)][code, ""] += 1

    def _scenario(self, capture: Views) -> Scenario | None:
        """The simulation of a capture; None, and a note, if it fails."""
        uses = parts = ""
        with self._noting("largest-parts", "The search for the largest parts"):
            uses, parts = device_use(capture), largest_parts(capture)
        try:
            whatif = scenario(capture)
            kinds, rank = kinds_in_words(whatif.counted_steps), capture.rank
            own = whatif.baseline_ns, kinds, uses, parts, -1 if rank is None else rank
            self.steps_ns[capture.phase].append(own)
            self.unexplained.append(whatif.unexplained)
            self.notes.update(dict.fromkeys(whatif.notes, 1))
        except Exception as error:
            self.notes[f"No saving is known: {_failure('The simulation', error)}"] += 1
            self.unsimulated = self.unsimulated or (uses, parts)
            return None
        return whatif

    def _with_place(self, found: list[_Found]) -> _Placed:
        """The median finding of a problem, with its windows, ranks and spread in the title.

        `found` is of one phase. The finding's phase is None if all captures are of this phase.
        """
        facts = []
        median = _median([each.finding for each in found])
        of_ranks = {rank for _, rank in self.runs}.union(s.rank for _, s in self.summaries) - {None}
        if median.code in _COMMUNICATION:
            median = self._with_lateness(median)
        phases = {phase or TRAIN for (phase, _), _ in self.runs}
        name = "" if len(phases) == 1 else f"{shortened(median.phase or TRAIN, _LONGEST_PHASE)} "
        windows = {each.window for each in found}
        ranks = sorted({each.rank for each in found if each.rank is not None})
        of_windows = {
            (*steps, k)
            for (steps, _), count in self.runs.items()
            for k in range(count)
            if (steps[0] or TRAIN) == median.phase
        }
        if len(of_windows) > 1 or name:
            facts.append(f"in {len(windows)} of {counted(len(of_windows), f'{name}window')}")
        if len(of_ranks) > 1 and len(ranks) == len(of_ranks):
            facts.append(f"on all {len(ranks)} ranks")
        elif len(of_ranks) > 1 and ranks:
            facts.append(f"on rank{'s'[: len(ranks) > 1]} {few(ranks)}")
        shares = [each.finding.share for each in found if each.finding.share is not None]
        spread = dict.fromkeys(map(percent, (min(shares), max(shares)))) if shares else {}
        # The share of `unmarked-time` is not always that of the title.
        has_spread = len(spread) > 1 and percent(median.share or 0) in median.title
        place = [", ".join(facts), " to ".join(spread) if has_spread else ""]
        where = "; ".join(filter(None, place))
        title = f"{median.title} ({where})" if where else median.title
        rows = median.evidence
        # Captures of one name cannot be told apart by `Finding.spans_in`.
        if self.captures.count(median.capture or "") > 1:
            rows = tuple(row._replace(start_ns=None, end_ns=None) for row in rows)
        if name:
            title = title.replace("of the step", f"of the {name}step", 1)
        placed = replace(median, title=title, evidence=rows, phase=median.phase if name else None)
        late = self.late.get(median.phase or TRAIN, set())
        is_of_late = 0 < len(ranks) < len(of_ranks) and late.issuperset(ranks)
        waits = median.code in _COMMUNICATION and median.saving is None
        follows_late = waits or (is_of_late and not median.ends_run)
        return _Placed(placed, 2 * len(windows) >= len(of_windows), follows_late)

    def _with_lateness(self, finding: Finding) -> Finding:
        """Promise no saving of communication if ranks are late, or if this is not known."""
        is_late = finding.phase in self.late
        if not is_late and finding.phase in self.compared:
            return finding
        waits = f"communication ({'' if is_late else 'perhaps '}with waits for late ranks)"
        title = finding.title.replace("communication", waits, 1)
        change = f"{_EVEN_FIRST if is_late else _COMPARE_FIRST} {finding.change}"
        return replace(finding, title=title, saving=None, change=change)

    def _not_checked(self, not_seen: list[str]) -> Iterator[str]:
        """One sentence for each remedy, with the codes of the checks that need it.

        `not_seen` are the checks that need device work, if there is none. For a failure without a
        remedy, the sentence is the failure's message.
        """
        if not_seen:
            sentence = "Without device work, these problems do not occur or cannot be seen"
            yield f"{sentence}: {', '.join(not_seen)}."
        of = len(self.captures)
        for remedy, counts in self.missing.items():
            captures: Counter[str] = Counter()
            for (code, _), count in counts.items():
                captures[code] += count
            reasons = {missing for _, missing in counts}
            message = remedy
            if reasons != {""}:
                *most, last = captures
                codes = f"{', '.join(most)} and {last}" if most else last
                because = f" ({reasons.pop()})" if len(reasons) == 1 else ""
                message = f"To check {codes}, {remedy}{because}."
            yield _of_captures(message, max(captures.values()), of)


def _range(steps: Sequence[tuple[int, str, str, str, int]]) -> tuple[int, int]:
    """The smallest and the largest step; (0, -1) for none."""
    found = [step_ns for step_ns, *_ in steps]
    return min(found, default=0), max(found, default=-1)


def _of_captures(sentence: str, count: int, of: int) -> str:
    return sentence if count == of else f"{sentence} ({count} of {of} captures)"


def _failure(what: str, error: Exception) -> str:
    """Say why a part of a diagnosis failed; `error` is the cause.

    Raises:
        TraceError, MemoryError: `error` has one of these types, and is raised as it is.
    """
    if isinstance(error, CaptureError):
        return str(error)
    if isinstance(error, (TraceError, MemoryError)):
        raise error
    kind, said = type(error).__name__, reason_of(error)
    said = said if len(said) <= _LONGEST_ERROR else f"{said[: _LONGEST_ERROR - 1]}…"
    why = kind if said == kind else f"{kind}: {said}"
    return f"{what} failed on this capture ({why}): please report it."


def _rank(placed: _Placed) -> tuple[bool, bool, bool, float, bool]:
    """The place of a finding, the higher the earlier."""
    finding, is_common, _ = placed
    is_known = finding.saving is not None
    return not finding.is_caveat, is_common, finding.ends_run, _cost(finding), is_known


def _causes_first(ranked: list[_Placed]) -> list[Finding]:
    """Move what follows from late ranks behind these, unless few windows have late ranks."""
    found = [each.finding for each in ranked]
    late = [each.finding for each in ranked if each.is_common and each.finding.code == _LATE]
    for each in (placed.finding for placed in ranked[::-1] if placed.follows_late):
        causes = [found.index(cause) for cause in late if cause.phase == each.phase]
        if causes and found.index(each) < causes[0]:
            found.remove(each)
            found.insert(causes[0], each)
    return found


def _cost(finding: Finding) -> float:
    """The share of the step that a finding saves; if it is unknown, half of the share in its title.

    An unknown saving lies between nothing and the share.
    """
    if finding.saving is not None:
        return finding.saving.share
    return float("-inf") if finding.share is None else finding.share / 2


def _median(findings: list[Finding]) -> Finding:
    """The finding with the median saving, or share if no saving is known; of two, the smaller."""
    known = [each for each in findings if each.saving is not None] or findings
    return sorted(known, key=_cost)[(len(known) - 1) // 2]
