"""`Scenario`: a recorded window with edits, and the simulated steps after these edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from instrument.base.errors import CaptureError, ConfigError, InstrumentError
from instrument.base.printable import printable
from instrument.base.units import duration, percent
from instrument.read.facts.device_work import COMMUNICATION
from instrument.read.facts.intervals import Intervals
from instrument.read.simulate import edits, selection
from instrument.read.simulate.builder import build_model
from instrument.read.simulate.critical_path import critical_path
from instrument.read.simulate.model import Costs, Model
from instrument.read.simulate.window import Window, meetings
from instrument.read.trace.events import Ints
from instrument.read.views import coverage_rows
from instrument.read.views.collectives import DEVICE, SYNCHRONISING
from instrument.read.views.coverage import ENOUGH, line, part
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.ranks.run import Ranks
    from instrument.read.views.table import Table

#: If a larger part of the window is unexplained, the scenario has a note.
MOST_UNEXPLAINED = 0.05
# If calls wait for unknown device work in a larger part of the window, the scenario has a note.
_MOST_UNKNOWN = 0.05
# A factor above `_MOST_FACTOR` is a mistake. Times below `_LATEST_NS` are far from the limit of 64
# bits.
_MOST_FACTOR, _LATEST_NS = 1_000_000, 2**58
# For each keyword, the function that selects the parts of a model that a glob matches.
_SELECT = {
    "range": selection.by_range,
    "operator": selection.by_operator,
    "kernel": selection.by_kernel,
    "sync": selection.by_waiting_call,
}


@dataclass(frozen=True)
class _Variant:
    """The costs of each rank after the edits, under one assumption (an index into `assumptions`).

    `form` says which form edits with an uncertain effect have (see `edits`).
    """

    costs: tuple[Costs, ...]
    assumption: int
    form: Literal["expected", "modest", "best"] = "expected"


@dataclass(frozen=True)
class Scenario:
    """A recorded window, as it would have run with some edits.

    `capture.whatif` is the window without edits. Each edit is a method that returns a new scenario,
    so that edits can be chained: `capture.whatif.workers(4).scale(kernel="*conv*", by=0.5)`. Globs
    choose what to edit: `*` stands for any text, `?` for one character.

    Attributes:
        window: the models of all ranks.
        edits: a description of each edit.
        variants: the costs after the edits, for each of `Window.assumptions`; if an edit has other
            forms than the expected one, one more variant for each. The first variant gives the
            estimate.
        losses: a sentence for each thing that is missing from the captures.
    """

    window: Window
    edits: tuple[str, ...]
    variants: tuple[_Variant, ...]
    losses: tuple[str, ...]

    @cached_property
    def steps(self) -> list[int]:
        """The simulated duration of each step, in nanoseconds; one entry if no step finished."""
        return self.window.simulated(self.variants[0].costs)

    @property
    def step_ns(self) -> int:
        """How long a step takes with the edits, in ns: `baseline_ns` minus `saving_ns`."""
        return self.baseline_ns - self.saving_ns

    @cached_property
    def baseline_ns(self) -> int:
        """The mean of `counted_steps`, in nanoseconds."""
        return sum(self.counted_steps) // len(self.counted_steps)

    @property
    def counted_steps(self) -> list[int]:
        """The durations of the recorded steps that count, in nanoseconds, without edits."""
        return self.window.recorded_steps(0)[self.window.counted]

    @cached_property
    def saving_ns(self) -> int:
        """How much shorter a step is with the edits, in nanoseconds; negative if it is longer."""
        return self._saved(0, self.steps)

    @cached_property
    def _savings(self) -> list[int]:
        others = [
            self._saved(each.assumption, self.window.simulated(each.costs))
            for each in self.variants[1:]
        ]
        return [self.saving_ns, *others]

    def _saved(self, assumption: int, after: Sequence[int]) -> int:
        before, kept = self.window.recorded_steps(assumption), self.window.counted
        share = 1 - sum(after[kept]) / max(sum(before[kept]), 1)
        return round(share * self.baseline_ns)

    @property
    def low_ns(self) -> int:
        """The smallest saving of all `variants`, in nanoseconds; see `notes`."""
        return min(self._savings)

    @property
    def high_ns(self) -> int:
        """The largest saving of all `variants`, in nanoseconds; see `notes`."""
        return max(self._savings)

    @property
    def unexplained(self) -> float:
        """The part of the window, 0 to 1, in which device work is late for an unknown reason.

        Of several ranks, the largest.
        """
        return max(each.unexplained for each in self.window.models)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each thing that makes the result uncertain."""
        models, found = self.window.models, list(self.losses)
        if not all(each.has_steps for each in models):
            found.append("No step finished in the recording: the whole window counts as one step.")
        if self.unexplained > MOST_UNEXPLAINED:
            found.append(
                f"For {percent(self.unexplained)} of the time, device work is late for an unknown "
                "reason. So the saving is also computed without these delays, and its bounds hold "
                "both results."
            )
        waits = max(each.unknown_wait_ns / max(each.span_ns, 1) for each in models)
        if waits > _MOST_UNKNOWN:
            found.append(
                f"For {percent(waits)} of the time, calls wait for unknown device work; these "
                "waits count as CPU time."
            )
        if self.window.waits_for_workers(self.variants[0].costs):
            found.append(
                "Steps wait for batches from worker processes of a data loader: here, a worker "
                "needs as long for a batch as in the recording, and begins it when the program "
                "takes an earlier one."
            )
        if len(models) == 1 and (models[0].work.kind == COMMUNICATION).any():
            found.append(
                "Other ranks are not in this capture: the estimate assumes that the edits apply to "
                "them too. The saving is also computed for other ranks that do not change, and its "
                "bounds hold both results."
            )
        return tuple(found)

    @cached_property
    def critical_path(self) -> Table:
        """The work and waits that decide how long a step takes; see `CRITICAL_PATH`."""
        return critical_path(self.window, self.variants[0].costs)

    def profile(self, rows: int = 12) -> Table:
        """How much shorter a step is if a range, an operator or a kernel is faster.

        On each rank, `rows` ranges, `rows` operators and `rows` kernels are simulated; see
        `instrument.read.simulate.causal_profile`.
        """
        from instrument.read.simulate.causal_profile import causal_profile

        return causal_profile(self.window, self.variants[0].costs, self.step_ns, rows)

    def scale(
        self,
        *,
        range: str | None = None,
        operator: str | None = None,
        kernel: str | None = None,
        by: float,
    ) -> Scenario:
        """Multiply the time of a part of the program by a factor.

        Give exactly one of the three globs. The waits of the CPU are not multiplied: the duration
        of a wait follows from the work that the CPU waits for.

        Args:
            range: ranges by name or path, with all that runs inside, their backward pass, and the
                device work that they launch. A glob that begins with `/`, such as
                `/train/forward`, must match the whole path.
            operator: operators by name, with all that runs inside, and the device work that they
                launch; or runtime calls by name, without device work.
            kernel: kernels, copies and memsets by name.
            by: the factor, at least 0; 0.5 is twice as fast.

        Raises:
            ConfigError: no glob or several globs are given, the glob matches nothing, or `by` is
                negative or too large.
        """
        self._check_factor("by", by, least=0.0)
        chosen, text = self._select(range=range, operator=operator, kernel=kernel)
        return self._with(f"{text} × {by:g}", partial(edits.scale, by=by), chosen)

    def scale_events(
        self,
        positions: Ints,
        by: float,
        *,
        bounds: tuple[float, float] | None = None,
        device: bool = True,
    ) -> Scenario:
        """Multiply the time of CPU events and device events by a factor.

        A CPU event includes all that runs inside and the device work that is launched there, but of
        a runtime call only its CPU time.

        Args:
            positions: positions in `capture.events`.
            by: the factor; 0 removes the events, and also the waits inside them.
            bounds: the factors for the bounds of the saving, the larger factor first.
            device: False leaves the device work as it is.

        Raises:
            ConfigError: a factor is negative or too large.
            CaptureError: the scenario has several ranks.
        """
        factors = self._factors_of_one_rank(by, bounds)
        chosen = [selection.of_events(self.window.models[0], positions, device=device)]
        forms = [partial(edits.scale, by=factor) if factor else edits.remove for factor in factors]
        return self._with(f"{len(positions)} events × {by:g}", forms[0], chosen, *forms[1:])

    def scale_spans(
        self, thread: int, spans: Intervals, by: float, *, bounds: tuple[float, float] | None = None
    ) -> Scenario:
        """Multiply the CPU time of one thread in some spans of time by a factor.

        Args:
            thread: the thread, as in `capture.events.thread`.
            spans: the starts and ends of the spans, on the clock of `capture.events`.
            by: the factor, at least 0.
            bounds: the factors for the bounds of the saving, the larger factor first.

        Raises:
            ConfigError: a factor is negative or too large.
            CaptureError: the scenario has several ranks.
        """
        factors = self._factors_of_one_rank(by, bounds)
        chosen = [selection.of_spans(self.window.models[0], thread, spans)]
        forms = [partial(edits.scale, by=factor) for factor in factors]
        return self._with(f"{len(spans[0])} spans × {by:g}", forms[0], chosen, *forms[1:])

    def remove(
        self,
        *,
        range: str | None = None,
        operator: str | None = None,
        kernel: str | None = None,
        sync: str | None = None,
    ) -> Scenario:
        """Remove a part of the program, and the waits in this part; see `scale` for the globs.

        Args:
            range: as for `scale`.
            operator: as for `scale`.
            kernel: as for `scale`; calls that launch only these kernels are removed too.
            sync: calls that wait for the device, by their name or by an operator around them.

        Raises:
            ConfigError: no glob or several globs are given, or the glob matches nothing.
        """
        chosen, text = self._select(range=range, operator=operator, kernel=kernel, sync=sync)
        return self._with(f"no {text}", edits.remove, chosen)

    def overlap(self, *, copy: str = "Memcpy*", positions: Ints | None = None) -> Scenario:
        """Let copies run beside the computation, as pinned memory and `non_blocking=True` do.

        Args:
            copy: copies by their name.
            positions: copies by their positions in `capture.events`, in place of `copy`.

        Raises:
            CaptureError: positions are given, and the scenario has several ranks.
            ConfigError: no copy matches.
        """
        modest = partial(edits.overlap, modest=True)
        if positions is not None:
            self._check_one_rank()
            own = [selection.of_events(self.window.models[0], positions)]
            return self._with(f"{len(positions)} copies overlapped", edits.overlap, own, modest)
        chosen = self._each(partial(selection.by_kernel, only_copies=True), copy)
        return self._with(f"copies {copy} overlapped", edits.overlap, chosen, modest)

    def asynchronous(self, *, sync: str = "*", positions: Ints | None = None) -> Scenario:
        """Let waiting calls return at once, as if the program worked without their results.

        Args:
            sync: calls by their name or by an operator around them, such as `aten::item`.
            positions: calls by their positions in `capture.events`, in place of `sync`.

        Raises:
            CaptureError: positions are given, and the scenario has several ranks.
            ConfigError: no call matches.
        """
        if positions is not None:
            self._check_one_rank()
            text = f"{len(positions)} calls asynchronous"
            return self._with(text, edits.asynchronous, [positions])
        calls = self._each(selection.calls_named, sync)
        return self._with(f"no wait in {sync}", edits.asynchronous, calls)

    def graph_launch(self, *, range: str) -> Scenario:
        """Replace each call of some ranges by one launch of a CUDA graph; see `edits.graph_launch`.

        Raises:
            ConfigError: no range matches.
            CaptureError: the range launches no device work.
        """
        chosen = self._each(selection.launching, range)
        modest = partial(edits.graph_launch, modest=True)
        return self._with(f"range {range} as a graph", edits.graph_launch, chosen, modest)

    def workers(self, count: float, *, bounds: tuple[float, float] | None = None) -> Scenario:
        """Load batches in `count` worker processes; see `edits.workers`.

        Args:
            count: the number of workers. 1.5 stands for workers that share CPUs, and so need as
                long for three batches as the training process for two.
            bounds: the numbers for the bounds of the saving, the smaller number first. Usually,
                these are half of `count`, but at least 1, and `count`.

        Raises:
            ConfigError: a number is not positive or too large.
            CaptureError: no data loader loads its batches in the training process.
        """
        least, most = bounds or (max(count / 2, min(count, 1)), count)
        if not 0 < min(least, count, most) <= max(least, count, most) <= _MOST_FACTOR:
            raise ConfigError(
                f"workers is {count:g}; give a positive number of at most {_MOST_FACTOR:g}."
            )
        chosen = self._each(selection.loading)
        edit, modest, best = (partial(edits.workers, count=n) for n in (count, least, most))
        return self._with(f"{count:g} workers", edit, chosen, modest, best)

    def bandwidth(self, factor: float, *, positions: Ints | None = None) -> Scenario:
        """Multiply the bandwidth between ranks; see `edits.bandwidth`.

        Args:
            factor: the factor.
            positions: only communication at these positions in `capture.events`.

        Raises:
            ConfigError: `factor` is below 0.000001 or too large.
            CaptureError: the capture has no communication; or positions are given, and the scenario
                has several ranks.
        """
        self._check_factor("bandwidth", factor, least=1e-6)
        if positions is None:
            chosen = self._each(selection.communication)
        else:
            self._check_one_rank()
            chosen = [selection.of_events(self.window.models[0], positions)]
        edit = partial(edits.bandwidth, factor=factor)
        return self._with(f"bandwidth × {factor:g}", edit, chosen)

    def balance(self) -> Scenario:
        """Give each rank the same amount of work, so that no collective waits for a slower rank.

        The work of a rank is its time without the waits in collectives. The CPU and device times of
        ranks with more work than the average are multiplied down to it. The other ranks do not
        change: they would do the additional work while they now wait.

        Raises:
            CaptureError: the scenario has one rank, or its ranks have no collective in common.
        """
        if self.window.meetings is None:
            raise CaptureError(
                "There are no collectives of several ranks in this scenario: give the captures of "
                "all ranks."
            )
        loads = self.window.loads_ns
        even = sum(loads) / len(loads)
        factors = [min(even / load, 1.0) if load else 1.0 for load in loads]
        return self._with("ranks balanced", edits.balance, factors)

    def _check_factor(self, name: str, factor: float, least: float) -> None:
        longest_ns = max(model.axis.span_ns for model in self.window.models)
        most = min(_MOST_FACTOR, _LATEST_NS / longest_ns)
        if not least <= factor <= most:
            raise ConfigError(
                f"{name} is {factor:g}; give a number of at least {least:g} and at most {most:g}."
            )

    def _factors_of_one_rank(
        self, by: float, bounds: tuple[float, float] | None
    ) -> tuple[float, ...]:
        factors = (by, *(bounds or ()))
        for factor in factors:
            self._check_factor("by", factor, least=0.0)
        self._check_one_rank()
        return factors

    def _check_one_rank(self) -> None:
        if len(self.window.models) > 1:
            raise CaptureError(
                f"Events can be selected by position only in a scenario of one rank, but this "
                f"scenario has {len(self.window.models)} ranks: use the scenario of one capture."
            )

    def _with(
        self,
        text: str,
        edit: Callable[..., Costs],
        chosen: Sequence[Any | None],
        modest: Callable[..., Costs] | None = None,
        best: Callable[..., Costs] | None = None,
    ) -> Scenario:
        """The scenario with one more edit, which changes `chosen` of each rank (None: nothing).

        `modest` is the same edit with a smaller effect, and `best` with a larger effect, if its
        effect is uncertain.
        """
        forms = {"expected": edit, "modest": modest or edit, "best": best or edit}
        variants = list(self.variants)
        present = {variant.form for variant in variants}
        if modest and "modest" not in present:
            variants.append(replace(variants[0], form="modest"))
        if best and "best" not in present:
            variants.append(replace(variants[0], form="best"))
        changed = []
        for variant in variants:
            form = forms[variant.form]
            costs = (
                own if each is None else form(model, own, each)
                for model, own, each in zip(self.window.models, variant.costs, chosen)
            )
            changed.append(replace(variant, costs=tuple(costs)))
        return replace(self, edits=(*self.edits, printable(text)), variants=tuple(changed))

    def _each(self, find: Callable[..., Any], *arguments: str) -> list[Any | None]:
        """For each rank, what `find` returns; None if it finds nothing on this rank.

        Raises:
            InstrumentError: `find` finds nothing on any rank; this is the error of the first rank.
        """
        found: list[Any | None] = []
        errors: list[InstrumentError] = []
        for each in self.window.models:
            try:
                found.append(find(each, *arguments))
            except (CaptureError, ConfigError) as error:
                found.append(None)
                errors.append(error)
        if len(errors) == len(found):
            raise errors[0]
        return found

    def _select(self, **globs: str | None) -> tuple[list[Any | None], str]:
        given = {name: glob for name, glob in globs.items() if glob is not None}
        if len(given) != 1:
            raise ConfigError(f"{len(given)} of {', '.join(globs)} are given; give exactly one.")
        ((name, glob),) = given.items()
        return self._each(_SELECT[name], glob), f"{name} {glob}"

    def __repr__(self) -> str:
        changes = ", ".join(self.edits) or "as recorded"
        return f"<Scenario: {changes}; step {duration(self.step_ns)}>"


def scenario(capture: Views) -> Scenario:
    """Return a capture's scenario without edits; it is made once for a capture.

    Raises:
        CaptureError: the trace has no CPU events, or is too long to simulate.
        TraceError: the trace cannot be read.
    """

    def made() -> Scenario:
        window = Window((_model(capture),), (capture.about.rank,))
        return _unedited(window, _losses(capture))

    return capture.once("scenario", made)


def joint_scenario(ranks: Ranks) -> Scenario:
    """Return a scenario without edits, of several ranks that wait for each other.

    Raises:
        CaptureError: a trace has no CPU events, or the ranks have no collective in common.
        TraceError: a trace cannot be read.
    """
    captures = [Views.load(path) for path in ranks.paths]
    matched, clocks = ranks.matched, ranks.measured_clocks
    joins = np.array([each[0] in SYNCHRONISING for each in matched.groups], np.bool_)
    on_device = np.array([each[-1] == DEVICE for each in matched.groups], np.bool_)
    of_capture = []
    for owner, capture in enumerate(captures):
        mine = (matched.owner == owner) & (joins & on_device)[matched.group]
        begins = matched.start_ns[mine] - capture.events.base_ns
        ends = matched.end_ns[mine] - capture.events.base_ns
        row = _communication_rows(capture, begins, ends)
        of_capture.append((matched.key[mine][row >= 0], row[row >= 0]))
    found = meetings(of_capture)
    if found is None:
        raise CaptureError(
            "The ranks have no collective in common, so they cannot be simulated together: give "
            "the captures of one window."
        )
    models = tuple(
        _model(capture, found.row[found.rank == rank]) for rank, capture in enumerate(captures)
    )
    own = np.array([each.events.begin_ns + each.events.base_ns for each in captures])
    begun = clocks.corrected_ns(np.arange(len(own)), own)
    shifts = tuple((begun - begun.min()).tolist())
    numbers = tuple(summary.rank for summary in ranks.summaries)
    window = Window(models, numbers, shifts, found)
    losses = dict.fromkeys(text for capture in captures for text in _losses(capture))
    return _unedited(window, tuple(losses))


def _communication_rows(capture: Views, start_ns: Ints, end_ns: Ints) -> Ints:
    """The row in `capture.work` of the communication with each start and end; -1 for none."""
    work = capture.work
    rows = np.flatnonzero(work.kind == COMMUNICATION)
    times = zip(work.start_ns[rows].tolist(), work.end_ns[rows].tolist())
    row_at = dict(zip(times, rows.tolist()))
    wanted = zip(start_ns.tolist(), end_ns.tolist())
    return np.array([row_at.get(each, -1) for each in wanted], np.int64)


def _model(capture: Views, meets: Ints | None = None) -> Model:
    found = build_model(capture.links, capture.work, meets, capture.loader)
    if not len(found.moments.step_end):
        raise CaptureError(
            "The trace has no CPU events, so no step can be simulated: record with "
            "profiler.activities=[cpu,cuda]."
        )
    return found


def _losses(capture: Views) -> tuple[str, ...]:
    found = [line(capture, coverage_rows.STEPS)]
    cost = part(capture, coverage_rows.UNDISTURBED)
    if cost is not None and cost.share and cost.share < ENOUGH:
        found.append(
            f"A recorded step takes {percent(1 / cost.share - 1)} longer than a step before the "
            "window: all times here are those of the recorded step."
        )
    return tuple(filter(None, found))


def _unedited(window: Window, losses: tuple[str, ...]) -> Scenario:
    variants = (_Variant(costs, k) for k, costs in enumerate(window.assumptions))
    return Scenario(window, (), tuple(variants), losses)
