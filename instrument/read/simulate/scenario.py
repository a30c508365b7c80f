"""`Scenario`: a recorded window with edits, and the simulated steps after these edits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from instrument.base.errors import CaptureError, ConfigError
from instrument.base.printable import printable
from instrument.base.units import duration, percent
from instrument.read.facts.intervals import Intervals
from instrument.read.simulate import edits, selection
from instrument.read.simulate.builder import build_model
from instrument.read.simulate.causal_profile import causal_profile
from instrument.read.simulate.critical_path import critical_path
from instrument.read.simulate.model import Costs, Model
from instrument.read.simulate.selection import Selection
from instrument.read.trace.events import Ints
from instrument.read.views import coverage_rows
from instrument.read.views.coverage import ENOUGH, line, part
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.views.table import Table

#: What a change does to a simulated step.
Edit: TypeAlias = "Callable[[Scenario], Scenario]"
#: If a larger part of the window is unexplained, the scenario has a note.
MOST_UNEXPLAINED = 0.05
# If calls wait for unknown device work in a larger part of the window, the scenario has a note.
_MOST_UNKNOWN = 0.05
# A factor above `_MOST_FACTOR` is a mistake. Times below `_LATEST_NS` are far from the limit of 64
# bits.
_MOST_FACTOR, _LATEST_NS = 1_000_000, 2**58
# For each keyword, the function that selects the parts of a model that a glob matches.
_SELECT: dict[str, Callable[[Model, str], Selection]] = {
    "range": selection.by_range,
    "operator": selection.by_operator,
    "layer": selection.by_layer,
    "kernel": selection.by_kernel,
}


class _Variant(NamedTuple):
    """The costs after the edits, under one of `Model.assumptions`.

    If the effect of an edit is uncertain, it has forms: the expected form gives the estimate, the
    modest form has a smaller effect, the best form a larger one.
    """

    costs: Costs
    assumption: int
    form: Literal["expected", "modest", "best"] = "expected"


@dataclass(frozen=True)
class Scenario:
    """A recorded window, as it would have run with some edits.

    `capture.whatif` is the window without edits. Each edit is a method that returns a new scenario,
    so that edits can be chained: `capture.whatif.workers(4).scale(kernel="*conv*", by=0.5)`. Globs
    choose what to edit: `*` stands for any text, `?` for one character. A method raises
    `ConfigError` if a glob matches nothing or a number is impossible, and `CaptureError` if the
    capture has nothing that the edit could change.

    Attributes:
        model: the simulated graph of the window.
        edits: a description of each edit.
        variants: the costs after the edits, for each assumption and form; the first gives the
            estimate.
        losses: a sentence for each thing that is missing from the capture.
    """

    model: Model
    edits: tuple[str, ...]
    variants: tuple[_Variant, ...]
    losses: tuple[str, ...]

    @cached_property
    def steps(self) -> list[int]:
        """The simulated duration of each step, in nanoseconds; one entry if no step finished."""
        return self.model.simulated(self.variants[0].costs)

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
        return self.model.recorded_steps()[self.model.counted]

    @cached_property
    def saving_ns(self) -> int:
        """How much shorter a step is with the edits, in nanoseconds; negative if it is longer."""
        return self._saved(0, self.steps)

    @cached_property
    def _savings(self) -> list[int]:
        others = [
            self._saved(each.assumption, self.model.simulated(each.costs))
            for each in self.variants[1:]
        ]
        return [self.saving_ns, *others]

    def _saved(self, assumption: int, after: list[int]) -> int:
        before, kept = self.model.recorded_steps(assumption), self.model.counted
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
        """The part of the window, 0 to 1, in which device work is late for an unknown reason."""
        return self.model.unexplained

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each thing that makes the result uncertain."""
        model, found = self.model, list(self.losses)
        if not model.has_steps:
            found.append("The trace shows no whole step: the recording counts as one step.")
        if model.unexplained > MOST_UNEXPLAINED:
            found.append(
                f"For {percent(model.unexplained)} of the time, device work is late for an unknown "
                "reason. So the saving is also computed without these delays, and its bounds hold "
                "both results."
            )
        waits = model.unknown_wait_ns / max(model.span_ns, 1)
        if waits > _MOST_UNKNOWN:
            found.append(
                f"For {percent(waits)} of the time, calls wait for unknown device work; these "
                "waits count as CPU time."
            )
        if model.waits_for_workers(self.variants[0].costs):
            found.append(
                "Steps wait for batches from worker processes of a data loader: here, a worker "
                "needs as long for a batch as in the recording, and begins it when the program "
                "takes an earlier one."
            )
        if len(model.ranks_arcs[0]):
            found.append(
                "Other ranks are not in this capture: the estimate assumes that the edits apply to "
                "them too. The saving is also computed for other ranks that do not change, and its "
                "bounds hold both results."
            )
        return tuple(found)

    @cached_property
    def critical_path(self) -> Table:
        """The work and waits that decide how long a step takes; see `CRITICAL_PATH`."""
        return critical_path(self.model, self.variants[0].costs)

    def profile(self, rows: int = 12) -> Table:
        """How much shorter a step is if a range, an operator or a kernel is faster.

        `rows` ranges, `rows` operators and `rows` kernels are simulated; see
        `instrument.read.simulate.causal_profile`.
        """
        return causal_profile(self.model, self.variants[0].costs, self.step_ns, rows)

    def scale(
        self,
        *,
        range: str | None = None,
        operator: str | None = None,
        layer: str | None = None,
        kernel: str | None = None,
        by: float,
    ) -> Scenario:
        """Multiply the time of a part of the program by a factor.

        Give exactly one of the four globs. The waits of the CPU are not multiplied: the duration
        of a wait follows from the work that the CPU waits for.

        Args:
            range: ranges by name or path, with all that runs inside, their backward pass, and the
                device work that they launch. A glob that begins with `/`, such as
                `/train/forward`, must match the whole path.
            operator: operators by name, with all that runs inside, and the device work that they
                launch; or runtime calls by name, without device work.
            layer: the device work of layers by their name in `capture.layers`.
            kernel: kernels, copies and memsets by name, or by their class in the table of events,
                such as attention.
            by: the factor, at least 0; 0.5 is twice as fast.
        """
        self._check_factors("by", by)
        chosen, text = self._select(range=range, operator=operator, layer=layer, kernel=kernel)
        return self._with(
            f"{text} × {by:g}", lambda costs: edits.scale(self.model, costs, chosen, by)
        )

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
        """
        chosen = selection.of_events(self.model, positions, device=device)
        return self._scaled(f"{len(positions)} events × {by:g}", chosen, by, bounds, removes=True)

    def scale_spans(
        self, thread: int, spans: Intervals, by: float, *, bounds: tuple[float, float] | None = None
    ) -> Scenario:
        """Multiply the CPU time of one thread in some spans of time; see `scale_events`.

        The thread and the starts and ends of the spans are those of `capture.events`.
        """
        chosen = selection.of_spans(self.model, thread, spans)
        return self._scaled(f"{len(spans[0])} spans × {by:g}", chosen, by, bounds)

    def remove(
        self,
        *,
        range: str | None = None,
        operator: str | None = None,
        layer: str | None = None,
        kernel: str | None = None,
    ) -> Scenario:
        """Remove a part of the program, and the waits in this part; see `scale` for the globs.

        With layers or kernels, the calls that launch only these kernels are removed too.
        """
        chosen, text = self._select(range=range, operator=operator, layer=layer, kernel=kernel)
        return self._with(f"no {text}", lambda costs: edits.remove(self.model, costs, chosen))

    def overlap(self, *, copy: str = "Memcpy*", positions: Ints | None = None) -> Scenario:
        """Let copies run beside the computation, as pinned memory and `non_blocking=True` do.

        Args:
            copy: copies by their name.
            positions: copies by their positions in `capture.events`, in place of `copy`.
        """
        if positions is None:
            text = f"copies {copy} overlapped"
            chosen = selection.by_kernel(self.model, copy, only_copies=True)
        else:
            text = f"{len(positions)} copies overlapped"
            chosen = selection.of_events(self.model, positions)
        return self._with(
            text,
            lambda costs: edits.overlap(self.model, costs, chosen),
            modest=lambda costs: edits.overlap(self.model, costs, chosen, modest=True),
        )

    def asynchronous(self, *, sync: str = "*", positions: Ints | None = None) -> Scenario:
        """Let waiting calls return at once, as if the program worked without their results.

        Args:
            sync: calls by their name or by an operator around them, such as `aten::item`.
            positions: calls by their positions in `capture.events`, in place of `sync`.
        """
        calls = selection.waiting_calls(self.model, sync) if positions is None else positions
        return self._with(
            f"no wait in {sync}" if positions is None else f"{len(positions)} calls asynchronous",
            lambda costs: edits.asynchronous(self.model, costs, calls),
        )

    def graph_launch(self, *, range: str) -> Scenario:
        """Replace each call of some ranges by one launch of a CUDA graph; see `edits.graph_launch`.

        The ranges must launch device work.
        """
        chosen = selection.by_range(self.model, range)
        if not chosen.rows.any():
            raise CaptureError(
                f"The range {range} launches no device work: a CUDA graph cannot help."
            )
        return self._with(
            f"range {range} as a graph",
            lambda costs: edits.graph_launch(self.model, costs, chosen),
            modest=lambda costs: edits.graph_launch(self.model, costs, chosen, modest=True),
        )

    def workers(self, count: float, *, bounds: tuple[float, float] | None = None) -> Scenario:
        """Load batches in worker processes instead of the training process; see `edits.workers`.

        Args:
            count: the number of workers. 1.5 stands for workers that share CPUs, and so need as
                long for three batches as the training process for two.
            bounds: the numbers for the bounds of the saving, the smaller number first. Usually,
                these are half of `count`, but at least 1, and `count`.
        """
        least, most = bounds or (max(count / 2, min(count, 1)), count)
        if not 0 < min(least, count, most) <= max(least, count, most) <= _MOST_FACTOR:
            raise ConfigError(
                f"workers is {count:g}; give a positive number of at most {_MOST_FACTOR:g}."
            )
        chosen = selection.loading(self.model)
        return self._with(
            f"{count:g} workers",
            lambda costs: edits.workers(self.model, costs, chosen, count),
            modest=lambda costs: edits.workers(self.model, costs, chosen, least),
            best=lambda costs: edits.workers(self.model, costs, chosen, most),
        )

    def bandwidth(self, factor: float, *, positions: Ints | None = None) -> Scenario:
        """Multiply the bandwidth between ranks; see `edits.bandwidth`.

        `positions` chooses communication by its positions in `capture.events`.
        """
        self._check_factors("bandwidth", factor, least=1e-6)
        if positions is None:
            chosen = selection.communication(self.model)
        else:
            chosen = selection.of_events(self.model, positions)
        return self._with(
            f"bandwidth × {factor:g}",
            lambda costs: edits.bandwidth(self.model, costs, chosen, factor),
        )

    def no_late_ranks(self) -> Scenario:
        """Let no collective wait for other ranks: each takes only its transfer time."""
        chosen = selection.communication(self.model)
        return self._with(
            "no late ranks", lambda costs: edits.no_late_ranks(self.model, costs, chosen)
        )

    def _select(self, **globs: str | None) -> tuple[Selection, str]:
        given = {name: glob for name, glob in globs.items() if glob is not None}
        if len(given) != 1:
            raise ConfigError(f"{len(given)} of {', '.join(globs)} are given; give exactly one.")
        ((name, glob),) = given.items()
        return _SELECT[name](self.model, glob), f"{name} {glob}"

    def _check_factors(self, name: str, *factors: float, least: float = 0.0) -> None:
        most = min(_MOST_FACTOR, _LATEST_NS / self.model.axis.span_ns)
        for factor in factors:
            if not least <= factor <= most:
                raise ConfigError(
                    f"{name} is {factor:g}; give a number of at least {least:g} and at most "
                    f"{most:g}."
                )

    def _scaled(
        self,
        text: str,
        chosen: Selection,
        by: float,
        bounds: tuple[float, float] | None,
        *,
        removes: bool = False,
    ) -> Scenario:
        """Multiply the time of a selection; with `removes`, a factor of 0 removes it."""
        self._check_factors("by", by, *(bounds or ()))

        def scaled(factor: float) -> Callable[[Costs], Costs]:
            if removes and not factor:
                return lambda costs: edits.remove(self.model, costs, chosen)
            return lambda costs: edits.scale(self.model, costs, chosen, factor)

        modest, best = map(scaled, bounds) if bounds else (None, None)
        return self._with(text, scaled(by), modest, best)

    def _with(
        self,
        text: str,
        edit: Callable[[Costs], Costs],
        modest: Callable[[Costs], Costs] | None = None,
        best: Callable[[Costs], Costs] | None = None,
    ) -> Scenario:
        """The scenario with one more edit; `modest` and `best` are its other forms."""
        forms = {"expected": edit, "modest": modest or edit, "best": best or edit}
        variants = list(self.variants)
        present = {variant.form for variant in variants}
        if modest and "modest" not in present:
            variants.append(variants[0]._replace(form="modest"))
        if best and "best" not in present:
            variants.append(variants[0]._replace(form="best"))
        changed = (each._replace(costs=forms[each.form](each.costs)) for each in variants)
        return replace(self, edits=(*self.edits, printable(text)), variants=tuple(changed))

    def __repr__(self) -> str:
        changes = ", ".join(self.edits) or "as recorded"
        return f"<Scenario: {changes}; step {duration(self.step_ns)}>"


def scenario(capture: Views) -> Scenario:
    """Return a capture's scenario without edits; it is made once for a capture.

    Raises:
        CaptureError: the trace has no CPU events, or is too long to simulate.
        TraceError: the trace cannot be read.
    """

    def compute() -> Scenario:
        model = build_model(
            capture.links, capture.work, capture.loader, lambda: capture.facts.layers
        )
        if not len(model.moments.step_end):
            raise CaptureError(
                "The trace has no CPU events, so no step can be simulated: record with "
                "profiler.activities=[cpu,cuda]."
            )
        variants = (_Variant(costs, k) for k, costs in enumerate(model.assumptions))
        return Scenario(model, (), tuple(variants), _losses(capture))

    return capture.once("scenario", compute)


def combined(capture: Views, changes: Iterable[Edit]) -> Scenario:
    """Simulate several changes together: `saving_ns` and its bounds are those of all of them.

    Savings of single changes do not add up. A later change applies to what the earlier ones leave:
    two changes of the same time multiply their factors, and what is removed stays removed. So leave
    out changes that exclude each other.
    """
    found = scenario(capture)
    for change in changes:
        found = change(found)
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
