"""`Check`: a row and a query for a kind of problem; `run_check` makes findings of its problems."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.base.errors import CaptureError, ConfigError
from instrument.base.units import percent
from instrument.read.advise.evidence import evidence, in_steps, share_of
from instrument.read.advise.finding import Evidence, Finding, Saving
from instrument.read.facts.places import common_place
from instrument.read.facts.scope import Scope, chosen_events
from instrument.read.simulate.scenario import Edit, Scenario
from instrument.read.trace.events import Ints, is_runtime
from instrument.read.trace.line_samples import LineSamples
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.ranks.run import Ranks

# Remedies that several checks have in common.
RECORD_SHAPES = "record with profiler.record_shapes=true"
RECORD_STEPS = "record with profiler.active=4 or more"
RECORD_AGAIN = "record with a session of this version of instrument"
QUIET_CPUS = "record while no other program uses the CPUs"
#: No change that saves a smaller share of the step is worth a finding, and no threshold is lower.
LEAST_SAVING = 0.01
_LEAST_SAMPLES = 100


class NotRecorded(CaptureError):  # noqa: N818
    """A check cannot run because the capture lacks something.

    A diagnosis has one sentence for all checks with the same remedy.

    Args:
        missing: what the capture lacks, such as "the trace has no Python stacks".
        remedy: what to do, such as "record with profiler.with_stack=true".
    """

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(f"{missing[:1].upper()}{missing[1:]}: {remedy}.")
        self.missing, self.remedy = missing, remedy


class NotApplicable(Exception):  # noqa: N818
    """A check is not about captures of this kind: it is listed nowhere."""


def samples_of_run(capture: Views, *, on_cpu: bool = False) -> tuple[LineSamples, int]:
    """The samples of the run, and how many are of the thread of the steps in the capture's phase.

    Raises:
        NotApplicable: there are none, or too few; or with `on_cpu`, there is device work, beside
            which a wait of the CPU may cost nothing.
    """
    found = capture.line_samples
    if found is None or (on_cpu and len(capture.work.event)):
        raise NotApplicable
    whole = sum(count for *_, count in found.of_phase(capture.phase))
    if whole < _LEAST_SAMPLES:
        raise NotApplicable
    return found, whole


class Need(NamedTuple):
    """Data without which a check cannot run, and what `NotRecorded` says without it."""

    is_met: Callable[[Views], bool]
    missing: str
    remedy: str


INPUT_TYPES = Need(
    lambda capture: bool((capture.events.types >= 0).any()),
    "the trace has no input types",
    RECORD_SHAPES,
)
MEMORY_EVENTS = Need(
    lambda capture: len(capture.events.memory) > 0,
    "the trace has no memory events",
    "record with profiler.profile_memory=true",
)
ONE_STEP = Need(
    lambda capture: len(capture.links.steps) > 0,
    "the trace has no finished step",
    "call session.step() after each step",
)
#: The first step and at least three to compare it with.
FOUR_STEPS = Need(
    lambda capture: len(capture.links.steps) > 3,
    "the trace has fewer than 4 finished steps",
    RECORD_STEPS,
)
DEVICE_WORK = Need(
    lambda capture: len(capture.work.event) > 0,
    "the trace has no device work",
    "record with a device among profiler.activities",
)


class Problem(NamedTuple):
    """What a check has found: events, and what makes a finding of them.

    Attributes:
        what: the text for `{what}` in the check's title.
        events: the positions of the events in `capture.events`; None if no events show the problem.
        share: the share of the step that the title names; None takes that of the events.
        edit: the simulated change, of no more than the problem's events or times; None scales the
            time of the events by `Check.factor`.
        place: the range and the source line; None finds those of 90 % of the events' time.
        evidence: the evidence; None makes a row for each name of the events.
        variant: which of several problems it is that the check looks for; see `Finding`.
        change, verify: replace those of the check.
        ends_run: whether the run soon fails because of the problem.
        is_large: whether it is a finding whatever its share; without a `share`, it has none.
        unclear: raised if the problem is large enough, because the capture does not show more.
        saves: instead of an edit, the share of the run that the change saves, with its bounds; it
            is taken as the share of a step.
    """

    what: str = ""
    events: Ints | None = None
    share: float | None = None
    edit: Edit | None = None
    place: tuple[str | None, str | None] | None = None
    evidence: tuple[Evidence, ...] | None = None
    variant: str = ""
    change: str = ""
    verify: str = ""
    ends_run: bool = False
    is_large: bool = False
    unclear: NotRecorded | None = None
    saves: tuple[float, float, float] | None = None


class Check(NamedTuple):
    """A kind of problem: its code, thresholds and texts, and the query for the events it blames.

    Attributes:
        code: the code of the findings, as in `Finding`.
        find: a condition in SQL over the columns of the table `events`, for the events to blame,
            such as `name = 'aten::sort' and counted`; or a function that yields the problems of a
            capture, of whatever share. It raises `NotRecorded` if the capture does not show whether
            it has the problem.
        title: the title of the findings, with the `{share}` that the events take, the number of
            `{calls}` a step, `{step}`, and the `{what}` of the problem.
        change: what to write instead.
        verify: how to check that the change helped: the options of `instrument show` that print it,
            with a comment behind two spaces and "#"; or a sentence.
        least_share: a problem is a finding if it takes at least this share of the step.
        lowest: users can set `least_share` to this or more.
        least_saving: there is no finding if the simulation saves a smaller share of the step.
        factor: the factor by which the simulation multiplies the time of the events and of their
            device work. None: the saving is known only if there is a `Problem.edit`.
        on_device: True if only a trace with device work can show the problem, False if only a trace
            without. In a trace without device work, a check that needs it never counts as passed.
        needs: the data without which the check cannot run.
        coverage: the rows of `capture.coverage` that the finding depends on.
        is_caveat: whether the problem makes the recording less exact instead of the program slower.
        assumes: what the saving assumes, as in `Finding`.
    """

    code: str
    find: str | Callable[[Views], Iterator[Problem]]
    title: str = "{what}"
    change: str = ""
    verify: str = ""
    least_share: float = 0.0
    lowest: float = LEAST_SAVING
    least_saving: float = LEAST_SAVING
    factor: float | None = None
    on_device: bool | None = None
    needs: tuple[Need, ...] = ()
    coverage: tuple[str, ...] = ()
    is_caveat: bool = False
    assumes: str = ""


class RanksCheck(NamedTuple):
    """A kind of problem that only shows if the ranks of a window are compared.

    `find` yields the findings of one window on all its ranks. It raises `NotRecorded` if the
    captures lack what it needs.
    """

    code: str
    find: Callable[[Ranks], Iterator[Finding]]


class Found(NamedTuple):
    """A finding, with the simulated change and the events that it blames, if there are any."""

    finding: Finding
    edit: Edit | None = None
    events: Ints | None = None


def run_check(check: Check, capture: Views, whatif: Scenario | None) -> Iterator[Found]:
    """Yield the findings of one check in one capture.

    `whatif` is the simulation without edits; None if the capture cannot be simulated: then no
    saving is known. If the simulation of one problem fails, this problem is no finding.

    Raises:
        NotRecorded: the capture lacks what the check needs.
        Exception: a simulation failed; raised after the findings.
    """
    if check.on_device is not None and _has_device_work(capture, check) != check.on_device:
        return
    for need in check.needs:
        if not need.is_met(capture):
            raise NotRecorded(need.missing, need.remedy)
    may_be_chance = is_found = False
    failure: Exception | None = None
    for problem in _problems(check, capture):
        share = _share(capture, problem)
        is_small = share is not None and share < check.least_share and not problem.is_large
        if is_small or (problem.events is not None and not len(problem.events)):
            continue
        if problem.unclear is not None:
            raise problem.unclear
        edit = problem.edit or _scaled(check, problem)
        try:
            scenario = edit(whatif) if edit is not None and whatif is not None else None
            if not is_worth(scenario, check.least_saving):
                continue
        except Exception as error:
            failure = failure or error
            continue
        if scenario is not None and _is_chance(capture, scenario):
            may_be_chance = True
            continue
        saving = saving_of(scenario) or _of_run(capture, problem)
        finding = _finding(check, problem, capture, share, saving)
        yield Found(finding, None if scenario is None else edit, problem.events)
        is_found = True
    if isinstance(failure, CaptureError):
        raise CaptureError(f"To check {check.code}, no change could be simulated: {failure}")
    if failure is not None:
        raise failure
    if may_be_chance and not is_found:
        raise NotRecorded("a thread without a CPU may explain the time", QUIET_CPUS)


def is_worth(scenario: Scenario | None, least_saving: float = LEAST_SAVING) -> bool:
    """Whether a change saves at least this share of the step; True if its saving is unknown."""
    if scenario is None:
        return True
    return scenario.saving_ns >= least_saving * scenario.baseline_ns


def saving_of(scenario: Scenario | None) -> Saving | None:
    """The figures of a simulated change; None for None. Simulates the bounds of the saving."""
    if scenario is None:
        return None
    saving_ns, low_ns = scenario.saving_ns, scenario.low_ns
    if saving_ns > 0:  # the change can be of no use, but does no harm
        low_ns = max(low_ns, 0)
    return Saving(scenario.baseline_ns, saving_ns, low_ns, scenario.high_ns)


def _of_run(capture: Views, problem: Problem) -> Saving | None:
    steps = capture.links.counted_steps
    if problem.saves is None or not steps.count:
        return None
    step_ns = round(steps.total_ns / steps.count)
    return Saving(step_ns, *(round(share * step_ns) for share in problem.saves))


def _problems(check: Check, capture: Views) -> Iterator[Problem]:
    if not isinstance(check.find, str):
        return check.find(capture)
    try:
        chosen = chosen_events(capture.facts, Scope(where=check.find))
    except ConfigError as error:
        raise CaptureError(f"The check {check.code} cannot run: {error}") from None
    return iter([Problem(events=np.flatnonzero(chosen))])


def _share(capture: Views, problem: Problem) -> float | None:
    if problem.share is not None or problem.is_large:
        return problem.share
    return None if problem.events is None else share_of(capture, problem.events)


def _scaled(check: Check, problem: Problem) -> Edit | None:
    events, by = problem.events, check.factor
    if by is None or events is None:
        return None
    return lambda whatif: whatif.scale_events(events, by=by)


def _finding(
    check: Check, problem: Problem, capture: Views, share: float | None, saving: Saving | None
) -> Finding:
    events, place, shown = problem.events, problem.place, problem.evidence
    if place is None:
        place = (None, None) if events is None else common_place(capture, events)
    if shown is None:
        shown = () if events is None else evidence(capture, events)
    verify = problem.verify or check.verify
    if verify.startswith("--"):  # ready to paste into a shell
        verify = f"instrument show {shlex.quote(str(capture.place))} {verify}"
    steps = capture.links.counted_steps
    calls = 0 if events is None else len(in_steps(capture, events)) / steps.count
    return Finding(
        code=check.code,
        title=check.title.format(
            share=percent(share or 0), step=steps.what, what=problem.what, calls=f"{calls:,.0f}"
        ),
        change=problem.change or check.change,
        verify=verify,
        saving=saving,
        range=place[0],
        source=place[1],
        evidence=shown,
        coverage=check.coverage,
        share=share,
        variant=problem.variant,
        ends_run=problem.ends_run,
        is_caveat=check.is_caveat,
        assumes=check.assumes,
    )


def _is_chance(capture: Views, scenario: Scenario) -> bool:
    """Whether few steps have the saving, and their thread got no CPU for as long.

    On a busy machine, any event can be long in one step, because its thread gets no CPU.
    """
    wait, before = capture.about.cpu_wait, scenario.model.recorded_steps()
    counted = scenario.model.counted
    taken_ns = np.maximum(before[counted], 1)
    saved_ns = taken_ns - scenario.steps[counted]
    is_rare = 2 * np.median(saved_ns / taken_ns) < saved_ns.sum() / taken_ns.sum()
    return bool(is_rare and wait and saved_ns.sum() <= (wait.waited_ns or 0))


def _has_device_work(capture: Views, check: Check) -> bool:
    """Whether the trace has device work.

    Raises:
        NotRecorded: the check needs device work; the trace has none, although a device was used.
    """
    has_work, events = DEVICE_WORK.is_met(capture), capture.events
    if has_work or not check.on_device:
        return has_work
    if events.devices or capture.about.devices or events.among(is_runtime).any():
        raise NotRecorded(DEVICE_WORK.missing, DEVICE_WORK.remedy)
    return False
