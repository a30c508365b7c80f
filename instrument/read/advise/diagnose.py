"""`diagnose`: run all checks on the captures of a run, and sort the findings by what they cost.

Several windows and ranks are diagnosed as one run: of the findings with the same code, range and
phase in several captures, the median is shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from instrument.base.errors import CaptureError, TraceError, reason_of
from instrument.base.prose import shortened
from instrument.base.step_times import kinds_in_words
from instrument.base.units import counted, duration, few, percent
from instrument.read.advise.autograd import (
    DEBUG_MODES,
    FROZEN_MODULES,
    UNUSED_AUTOGRAD,
    UNUSED_GRADIENTS,
)
from instrument.read.advise.check import (
    QUIET_CPUS,
    Check,
    Found,
    NotApplicable,
    NotRecorded,
    RanksCheck,
    run_check,
    saving_of,
)
from instrument.read.advise.communication import EXPOSED_COMMUNICATION, SLOW_LINKS, STRAGGLERS
from instrument.read.advise.diagnosis import Diagnosis, Together
from instrument.read.advise.finding import Finding, Saving
from instrument.read.advise.host import (
    BUSY_CPUS,
    GARBAGE_COLLECTION,
    GRAPH_BREAKS,
    RECOMPILATION,
    THREAD_OVERSUBSCRIPTION,
)
from instrument.read.advise.loader import LOADER_WAIT
from instrument.read.advise.loops import LOOP
from instrument.read.advise.memory import ALLOCATOR_CHURN, MEMORY_GROWTH
from instrument.read.advise.needless import (
    DENSE_GRADIENTS,
    NEEDLESS_COPIES,
    PADDING,
    REPEATED_WORK,
    UNUSED_RESULTS,
)
from instrument.read.advise.operators import (
    ATTENTION_NOT_FUSED,
    FLOAT16,
    FLOAT64,
    LAYOUT_AND_CASTS,
    TENSOR_CORES,
)
from instrument.read.advise.recording import FIRST_STEP, LEAST_EXCESS, RECORDING_OVERHEAD
from instrument.read.advise.samples import BUSY_THREAD, GROWTH, WAITING, WORKER_START
from instrument.read.advise.settings import DEFAULT, Settings
from instrument.read.advise.slow import (
    IN_PIECES,
    OPTIMIZER_NOT_FUSED,
)
from instrument.read.advise.untrained import BESIDE_TRAINING, NOT_TRAINING
from instrument.read.advise.verdict import is_large
from instrument.read.advise.waits import (
    BLOCKING_COPIES,
    DEVICE_IDLE,
    LAUNCH_BOUND,
    ONE_TIME_COSTS,
    SYNCHRONISING_CALLS,
)
from instrument.read.simulate.scenario import Edit, Scenario, combined, scenario
from instrument.read.views.coverage import lost_events
from instrument.read.views.device_use import device_use
from instrument.read.views.efficiency import near_peak
from instrument.read.views.find_captures import left_out, newest_run
from instrument.read.views.largest_parts import NOTHING, Heaviest, heaviest, largest_parts
from instrument.read.views.layers import LayerEvidence, layer_evidence
from instrument.read.views.views import TRAIN, Views
from instrument.read.views.witness import consequences

if TYPE_CHECKING:
    from instrument.read.ranks.rank_summary import RankSummary

#: The checks that `diagnose` runs on each capture. Findings that cost the same keep this order.
CHECKS: tuple[Check, ...] = (
    LOADER_WAIT,
    WORKER_START,
    WAITING,
    BUSY_THREAD,
    GROWTH,
    SYNCHRONISING_CALLS,
    LOOP,
    OPTIMIZER_NOT_FUSED,
    IN_PIECES,
    ONE_TIME_COSTS,
    LAUNCH_BOUND,
    DEVICE_IDLE,
    BLOCKING_COPIES,
    EXPOSED_COMMUNICATION,
    SLOW_LINKS,
    TENSOR_CORES,
    FLOAT64,
    FLOAT16,
    ATTENTION_NOT_FUSED,
    LAYOUT_AND_CASTS,
    REPEATED_WORK,
    NEEDLESS_COPIES,
    UNUSED_RESULTS,
    PADDING,
    DENSE_GRADIENTS,
    ALLOCATOR_CHURN,
    RECOMPILATION,
    GRAPH_BREAKS,
    GARBAGE_COLLECTION,
    THREAD_OVERSUBSCRIPTION,
    BUSY_CPUS,
    MEMORY_GROWTH,
    UNUSED_AUTOGRAD,
    UNUSED_GRADIENTS,
    FROZEN_MODULES,
    DEBUG_MODES,
    FIRST_STEP,
    RECORDING_OVERHEAD,
    NOT_TRAINING,
    BESIDE_TRAINING,
)
#: The checks that `diagnose` runs on the ranks of each window.
RANKS_CHECKS: tuple[RanksCheck, ...] = (STRAGGLERS,)
# If the ranks cannot be compared, this code stands for all checks in RANKS_CHECKS.
_RANKS = "ranks"
# The checks whose time may be a wait for a late rank.
_COMMUNICATION = (EXPOSED_COMMUNICATION.code, SLOW_LINKS.code)
_EVEN_FIRST = "Give the ranks equally much work first: to send less does not shorten their waits."
_COMPARE_FIRST = (
    "First give the captures of all ranks to `instrument diagnose`, which shows whether they wait "
    "for a late one: to send less does not shorten such a wait."
)
_LONGEST_ERROR, _LONGEST_PHASE = 100, 44
# The captures' mean steps differ if the largest is this many times the smallest.
_DIFFER = 1.2
# The changes of so many findings, the first ones, are simulated together.
_TOGETHER = 3
# What tells problems apart: code, variant, range, phase, and the number among equal ones.
_Key: TypeAlias = tuple[str, str, str | None, str, int]
# If at least this share of the critical path is on the CPU, the CPU is the limit.
_LEAST_CPU = 0.5


def diagnose(
    captures: Views | Iterable[Views],
    checks: Iterable[Check] = CHECKS,
    ranks_checks: Iterable[RanksCheck] = RANKS_CHECKS,
    *,
    ignore: Iterable[str] = (),
    thresholds: Mapping[str, float] | None = None,
) -> Diagnosis:
    """Run the checks on the captures of a run: one capture, or several windows and ranks.

    If there are captures of several runs, only the newest run is diagnosed, and `not_checked` says
    which captures were left out. The diagnosis keeps no capture in memory.

    Args:
        captures: one capture, or several.
        checks: what to look for in each capture.
        ranks_checks: what to look for by comparing the ranks of each window.
        ignore: codes of findings to leave out.
        thresholds: by code, the least share of the step of a finding.

    Cost: for each capture, about the time of reading it, plus the time of the simulations.

    Raises:
        CaptureError: there is no capture, or a capture holds no trace.
        ConfigError: a code is unknown, or a threshold is not possible.
        TraceError: a trace cannot be read.
    """
    codes = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    settings, sentences = Settings(codes, thresholds or {}), list[str]()
    seen = Diagnosing(tuple(checks), tuple(ranks_checks), settings)
    if isinstance(captures, Views):
        seen.add(captures)
    else:
        newest, older = newest_run(captures, lambda capture: capture.about)
        named = [(capture.name, capture.place) for capture in older]
        sentences += filter(None, [left_out(named, [capture.name for capture in newest])])
        while newest:
            seen.add(newest.pop(0))
    diagnosis = seen.diagnosis
    return replace(diagnosis, not_checked=(*sentences, *diagnosis.not_checked))


class _Occurrence(NamedTuple):
    """A finding in one window; `rank` is None for a comparison of ranks."""

    finding: Finding
    window: Any
    rank: int | None


class _Placed(NamedTuple):
    """The finding of a problem in all windows.

    `is_common` is whether at least half of the windows of its phase have the problem, and
    `follows_late` whether late ranks are its cause, or only late ranks have it.
    """

    finding: Finding
    is_common: bool
    follows_late: bool


@dataclass(slots=True)
class _Seen:
    """What is kept of a capture.

    `window` is its phase, its first step, and a number: the same steps of the same rank again are
    another window, because they are of another run.
    """

    name: str
    phase: str
    rank: int | None
    window: tuple[str | None, int | None, int]
    has_device_work: bool
    has_steps: bool
    lost_events: str
    sentences: tuple[str, str] = ("", "")  # what the device does, and the largest parts
    heaviest: Heaviest = NOTHING
    near_peak: str = ""
    layers: LayerEvidence | None = None
    step_ns: int | None = None
    step_kinds: str = ""
    unexplained: float = 0.0


class Diagnosing:
    """The results of the checks for the captures so far, as if all were of one run.

    A check that fails counts as not checked, and the other checks run. If the simulation fails, no
    saving is known. A rank whose summary fails is not compared.
    """

    def __init__(
        self,
        checks: tuple[Check, ...] = CHECKS,
        ranks_checks: tuple[RanksCheck, ...] = RANKS_CHECKS,
        settings: Settings = DEFAULT,
    ) -> None:
        self.checks = settings.applied(checks, (*CHECKS, *RANKS_CHECKS, *checks, *ranks_checks))
        self.ranks_checks = ranks_checks
        self.ignored = settings.ignore
        self.seen: list[_Seen] = []
        self.windows: Counter[tuple[Any, int | None]] = Counter()  # captures by steps and rank
        self.problems: dict[_Key, list[_Occurrence]] = defaultdict(list)
        self.together: dict[tuple[_Key, ...], list[Saving]] = defaultdict(list)
        # The number of captures, by remedy (or else message), then by code and what is missing.
        self.missing: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self.passed: set[str] = set()
        self.summaries: list[tuple[Path | str, RankSummary]] = []
        self.compared: set[str] = set()  # the phases with a window of all ranks
        # by phase, the ranks that others wait for; none if these differ
        self.late: dict[str, set[int | None]] = defaultdict(set)
        self.notes: Counter[str] = Counter()

    @property
    def has_device_work(self) -> bool:
        """Whether a capture has device work."""
        return any(each.has_device_work for each in self.seen)

    def add(self, capture: Views) -> bool:
        """Run the checks of one capture; without a trace, only compare its rank, and return False.

        Raises:
            CaptureError: the capture holds no trace, and no summary of a rank.
            TraceError: the trace cannot be read.
        """
        place = capture.place
        if place is not None and capture.trace_path is None:
            from instrument.read.ranks.rank_summary import without_trace

            if summary := without_trace(capture):
                self.summaries.append((place, summary))
                return False
        capture.events  # noqa: B018 - raises if the capture holds no trace
        about, rank = capture.about, capture.rank
        steps = about.window.phase, about.window.first_step
        now = _Seen(
            name=capture.name,
            phase=capture.phase,
            rank=rank,
            window=(*steps, self.windows[steps, rank]),
            has_device_work=len(capture.work.event) > 0,
            has_steps=len(capture.links.steps) > 0,
            lost_events=" ".join([lost_events(capture), *consequences(capture)]).strip(),
        )
        self.seen.append(now)
        self.windows[steps, rank] += 1
        whatif, simulated = self._scenario(capture, now), list[tuple[_Key, Found]]()
        for check in self.checks:
            find = partial(run_check, check, capture, whatif)
            simulated += self._keep(check.code, find, now.window, now.phase, rank, now.name)
        world_size = about.world_size or capture.events.world_size or 1
        self._simulate_together(capture, simulated)
        large = (each.finding for _, each in simulated if is_large(each.finding))
        if all(each.is_caveat or each.code in self.ignored for each in large):
            with self._noting("near-peak", "The comparison with the peak"):
                now.near_peak = near_peak(capture)
        is_of_several = world_size > 1 or capture.given_rank is not None
        if is_of_several and place is not None and self.ranks_checks:
            from instrument.read.ranks.rank_summary import summarize

            with self._noting(_RANKS, "The summary of a rank"):
                self.summaries.append((place, summarize(capture)))
        return True

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The diagnosis of all captures, with a comparison of the ranks; add no capture after it.

        Raises:
            CaptureError: there is no capture with a trace.
        """
        if not self.seen:
            raise CaptureError("There is no trace to diagnose: give a capture that holds one.")
        self._compare_ranks()
        self._doubt_cost_of_recording()
        placed = {key: self._with_place(found) for key, found in self.problems.items()}
        ranked = sorted(placed, key=lambda key: _rank(placed[key]), reverse=True)
        ranked = _causes_first(ranked, placed)
        keys = [key for key in ranked if key[0] not in self.ignored]
        codes = [*(each.code for each in self.checks), *(each.code for each in self.ranks_checks)]
        silent = self.passed.difference(
            (code for code, *_ in self.problems),
            (code for counts in self.missing.values() for code, _ in counts),
        )
        not_seen = []
        if not self.has_device_work:
            not_seen = [each.code for each in self.checks if each.on_device and each.code in silent]
        stepping = [each for each in self.seen if each.step_ns is not None]
        phases = [each.phase for each in stepping]
        phase = TRAIN if TRAIN in phases else next(iter(phases), TRAIN)
        alike = [each for each in stepping if each.phase == phase] or self.seen[:1]
        shown = sorted(alike, key=lambda each: each.step_ns or 0)[(len(alike) - 1) // 2]
        device_use, parts = shown.sentences
        if shown.rank is not None and len({each.rank for each in self.seen}) > 1:
            device_use, parts = (
                text and f"On rank {shown.rank}: {text}" for text in shown.sentences
            )
        steps_ns = self._steps_ns(phase)
        low, high = min(steps_ns, default=0), max(steps_ns, default=-1)
        of = len(self.seen)
        lost = [each for each in self.seen if each.lost_events][:1]
        return Diagnosis(
            captures=tuple(each.name for each in self.seen),
            findings=tuple(placed[key].finding for key in keys),
            passed=tuple(code for code in codes if code in silent.difference(not_seen)),
            not_checked=tuple(self._not_checked(not_seen)),
            notes=tuple(_of_captures(note, n, of) for note, n in self.notes.items()),
            step_ns=shown.step_ns,
            step_phase=phase if len({each.phase for each in self.seen}) > 1 else None,
            step_kinds=shown.step_kinds,
            between_ns=(low, high) if high >= _DIFFER * low else None,
            has_steps=any(each.has_steps for each in self.seen),
            unexplained=max((each.unexplained for each in stepping), default=None),
            largest_parts=parts,
            device_use=device_use,
            heaviest=shown.heaviest.sentence,
            heaviest_share=shown.heaviest.share,
            lines=shown.heaviest.rows,
            near_peak=shown.near_peak,
            layers=shown.layers,
            lost_events="".join(
                f"{each.name}: {each.lost_events}" if of > 1 else each.lost_events for each in lost
            ),
            together=self._together([(key, placed[key].finding) for key in keys[:_TOGETHER]]),
            ignored=tuple(key[0] for key in ranked if key[0] in self.ignored),
        )

    def _steps_ns(self, phase: str) -> list[int]:
        return [each.step_ns for each in self.seen if each.phase == phase and each.step_ns]

    def _simulate_together(self, capture: Views, found: list[tuple[_Key, Found]]) -> None:
        """Simulate the first findings of a capture together, except those of the same events."""
        known = [each for each in found if not each[1].finding.is_caveat]
        known = [each for each in known if each[0][0] not in self.ignored]
        known.sort(key=lambda each: _order(each[1].finding), reverse=True)
        chosen, edits, events = list[_Key](), list[Edit](), np.zeros(0, np.int64)
        for key, (_, edit, blamed) in known[:_TOGETHER]:
            own = np.zeros(0, np.int64) if blamed is None else blamed
            if edit is not None and not np.isin(own, events).any():
                chosen.append(key)
                edits.append(edit)
                events = np.append(events, own)
        with self._noting("together", "The simulation of several changes"):
            if len(chosen) > 1 and (saving := saving_of(combined(capture, edits))):
                self.together[tuple(chosen)].append(saving)

    def _together(self, first: list[tuple[_Key, Finding]]) -> Together | None:
        """The median saving of the captures in which the same findings were simulated together."""
        known = {key: at for at, (key, finding) in enumerate(first, 1) if finding.saving}
        counts = [(len(s), keys) for keys, s in self.together.items() if known.keys() >= {*keys}]
        if not counts:
            return None
        _, keys = max(counts, key=lambda each: each[0])
        savings = sorted(self.together[keys], key=lambda saving: saving.share)
        return Together(tuple(sorted(known[key] for key in keys)), savings[(len(savings) - 1) // 2])

    def _doubt_cost_of_recording(self) -> None:
        """Blame no recording for long steps if windows differ as much from each other."""
        code = RECORDING_OVERHEAD.code
        for key in [key for key in self.problems if key[0] == code]:
            steps_ns = self._steps_ns(key[3]) or [0]
            low, high = min(steps_ns), max(steps_ns)
            if high >= (1 + LEAST_EXCESS) * low > 0:
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
                    find = partial(map, Found, check.find(ranks))
                    self._keep(check.code, find, ranks.where, phase)
                if any(key[0] == STRAGGLERS.code and key[3] == phase for key in self.problems):
                    self.late[phase].update(ranks.stragglers.column("rank"))
            if not windows:
                message = "The ranks were not compared: give the captures of all ranks of a window."
                self.missing[message][_RANKS, ""] = len(self.seen)

    def _keep(
        self,
        code: str,
        find: Callable[[], Iterator[Found]],
        window: Any,
        phase: str,
        rank: int | None = None,
        capture: str | None = None,
    ) -> list[tuple[_Key, Found]]:
        """Add the findings of one check in one capture or window."""
        number: Counter[tuple[Any, ...]] = Counter()
        kept = []
        with self._noting(code, f"The check {code}"):
            for each in find():
                finding = replace(each.finding, capture=capture, phase=phase)
                of = finding.code, finding.variant, finding.range, phase
                key = (*of, number[of])
                number[of] += 1
                self.problems[key].append(_Occurrence(finding, window, rank))
                kept.append((key, each))
            self.passed.add(code)
        return kept

    @contextmanager
    def _noting(self, code: str, what: str) -> Iterator[None]:
        """Note an error in `missing` instead of raising it; see `_failure`."""
        try:
            yield
        except NotApplicable:
            pass
        except NotRecorded as error:
            self.missing[error.remedy][code, error.missing] += 1
        except Exception as error:
            self.missing[_failure(what, error)][code, ""] += 1

    def _scenario(self, capture: Views, now: _Seen) -> Scenario | None:
        """The simulation of a capture; None, and a note, if it fails."""
        whatif = None
        try:
            whatif = scenario(capture)
            now.step_kinds = kinds_in_words(whatif.counted_steps)
            now.step_ns, now.unexplained = whatif.baseline_ns, whatif.unexplained
            self.notes.update(dict.fromkeys(whatif.notes, 1))
        except Exception as error:
            whatif = None
            self.notes[f"No saving is known: {_failure('The simulation', error)}"] += 1
        with self._noting("lines", "The search for the largest lines"):
            now.heaviest = heaviest(capture)
        with self._noting("largest-parts", "The search for the largest parts"):
            use = device_use(capture, lambda: whatif is not None and _is_cpu_the_limit(whatif))
            now.sentences = use, largest_parts(capture, in_ranges=bool(now.heaviest.rows))
        with self._noting("layers", "The search for layers"):
            now.layers = layer_evidence(capture)
        return whatif

    def _with_place(self, found: list[_Occurrence]) -> _Placed:
        """The median finding of a problem, with its windows, ranks and spread in the title.

        `found` is of one phase. The finding's phase is None if all captures are of this phase.
        """
        median = _median([each.finding for each in found])
        if median.code in _COMMUNICATION:
            median = self._with_lateness(median)
        phase = median.phase or TRAIN
        has_phases = len({each.phase for each in self.seen}) > 1
        name = f"{shortened(phase, _LONGEST_PHASE)} " if has_phases else ""
        windows = {each.window for each in found}
        of_windows = {each.window for each in self.seen if each.phase == phase}
        ranks = sorted({each.rank for each in found if each.rank is not None})
        of_ranks = {each.rank for each in self.seen} | {each.rank for _, each in self.summaries}
        of_ranks -= {None}
        facts = []
        if len(of_windows) > 1 or name:
            facts.append(f"in {len(windows)} of {counted(len(of_windows), f'{name}window')}")
        if len(of_ranks) > 1 and ranks:
            named = f"rank{'s'[: len(ranks) > 1]} {few(ranks)}"
            is_all = len(ranks) == len(of_ranks)
            facts.append(f"on all {len(ranks)} ranks" if is_all else f"on {named}")
        shares = [each.finding.share for each in found if each.finding.share is not None]
        spread = dict.fromkeys(map(percent, (min(shares), max(shares)))) if shares else {}
        place = [", ".join(facts), " to ".join(spread) if len(spread) > 1 else ""]
        where = "; ".join(filter(None, place))
        title = f"{median.title} ({where})" if where else median.title
        if name:
            title = title.replace("of the step", f"of the {name}step", 1)
        rows = median.evidence
        # Captures of one name cannot be told apart by `Finding.spans_in`.
        if sum(each.name == median.capture for each in self.seen) > 1:
            rows = tuple(row._replace(start_ns=None, end_ns=None) for row in rows)
        is_of_late = 0 < len(ranks) < len(of_ranks) and self.late.get(phase, set()).issuperset(
            ranks
        )
        waits = median.code in _COMMUNICATION and median.saving is None
        return _Placed(
            replace(median, title=title, evidence=rows, phase=median.phase if name else None),
            is_common=2 * len(windows) >= len(of_windows),
            follows_late=waits or (is_of_late and not median.ends_run),
        )

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
        for remedy, counts in self.missing.items():
            captures: Counter[str] = Counter()
            for (code, _), count in counts.items():
                captures[code] += count
            reasons, message = {missing for _, missing in counts}, remedy
            if reasons != {""}:
                *most, last = captures
                codes = f"{', '.join(most)} and {last}" if most else last
                because = f" ({reasons.pop()})" if len(reasons) == 1 else ""
                message = f"To check {codes}, {remedy}{because}."
            yield _of_captures(message, max(captures.values()), len(self.seen))


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


def _is_cpu_the_limit(whatif: Scenario) -> bool:
    """Whether at least half of the critical path of the simulated steps is on the CPU."""
    path = whatif.critical_path
    return sum(row.share or 0.0 for row in path if row.kind == "CPU") >= _LEAST_CPU


def _rank(placed: _Placed) -> tuple[Any, ...]:
    """The place of a finding, the higher the earlier."""
    return not placed.finding.is_caveat, placed.is_common, *_order(placed.finding)


def _order(finding: Finding) -> tuple[bool, float, bool]:
    return finding.ends_run, _cost(finding), finding.saving is not None


def _causes_first(ranked: list[_Key], placed: dict[_Key, _Placed]) -> list[_Key]:
    """Move what follows from late ranks behind these, unless few windows have late ranks."""
    found = [*ranked]
    late = [key for key in ranked if placed[key].is_common and key[0] == STRAGGLERS.code]
    for key in (key for key in ranked[::-1] if placed[key].follows_late):
        causes = [found.index(cause) for cause in late if cause[3] == key[3]]
        if causes and found.index(key) < causes[0]:
            found.remove(key)
            found.insert(causes[0], key)
    return found


def _cost(finding: Finding) -> float:
    """The share of the step that a finding saves; if it is unknown, half of the share in its title.

    An unknown saving lies between nothing and the share, and so does one with a condition.
    """
    if finding.saving is not None:
        return finding.saving.share / (2 if finding.assumes.startswith("if ") else 1)
    return float("-inf") if finding.share is None else finding.share / 2


def _median(findings: list[Finding]) -> Finding:
    """The finding with the median saving, or share if no saving is known; of two, the smaller."""
    known = [each for each in findings if each.saving is not None] or findings
    return sorted(known, key=_cost)[(len(known) - 1) // 2]
