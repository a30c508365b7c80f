"""`Scenario`: a recorded window with edits, and the step that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis import coverage_rows
from instrument.analysis.breakdown import COMMUNICATION
from instrument.analysis.coverage import incomplete
from instrument.errors import CaptureError, ConfigError
from instrument.trace.events import Ints
from instrument.units import duration
from instrument.whatif import edits, selection
from instrument.whatif.critical_path import critical_path, slack
from instrument.whatif.model import Costs, Model, model
from instrument.whatif.selection import Selection

if TYPE_CHECKING:
    from instrument.analysis.table import Table
    from instrument.analysis.views import Views

#: The part of the span that may be unexplained before the simulation says so.
MOST_UNEXPLAINED = 0.05
# The part of a step that calls may wait for unknown work before the simulation says so.
_MOST_UNKNOWN = 0.05
_AXES = ("range", "operator", "kernel", "thread")


@dataclass(frozen=True)
class _Variant:
    """The same edits under other assumptions; the spread of the variants gives the bounds."""

    costs: Costs
    is_modest: bool = False


@dataclass(frozen=True)
class Scenario:
    """A recorded window, as it would have run with some edits.

    `capture.whatif` is the window without edits. Each method returns a new scenario with one more
    edit, so that edits compose: `capture.whatif.workers(4).scale(kernel="*conv*", by=0.5)`. Globs
    choose what to edit: `*` stands for any text, `?` for one character.

    The simulation has no effects that the recording does not show: faster caches, other clock
    rates, contention for cores. The recorded step itself is longer than one without a profiler.

    Attributes:
        model: what waits for what in the window.
        edits: a description of each edit.
    """

    model: Model
    edits: tuple[str, ...]
    variants: tuple[_Variant, ...]
    losses: tuple[str, ...]

    @cached_property
    def steps(self) -> list[int]:
        """The simulated duration of each step, in nanoseconds; one entry if no step finished."""
        return self._steps(self.variants[0])

    @property
    def step_ns(self) -> int:
        """The median simulated step, without the first one.

        The first step after an edit has no backlog of launched work yet.
        """
        return _typical(self.steps)

    @cached_property
    def baseline_ns(self) -> int:
        """The median simulated step without edits; it repeats the recorded one."""
        return _typical(self._steps(_Variant(self.model.measured)))

    @property
    def saving_ns(self) -> int:
        """How much shorter the step is than without edits; negative if it is longer."""
        return self.baseline_ns - self.step_ns

    @cached_property
    def _savings(self) -> list[int]:
        unedited = _variants(self.model)
        # An edit that changes nothing under one assumption can still do so under another.
        found = []
        for variant, plain in zip(self.variants, unedited):
            before = _typical(self._steps(plain))
            found.append(before - _typical(self._steps(variant)))
        return found

    @property
    def low_ns(self) -> int:
        """The least saving, over all assumptions: see `notes`."""
        return min(self._savings)

    @property
    def high_ns(self) -> int:
        """The largest saving, over all assumptions."""
        return max(self._savings)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What makes the result uncertain, a sentence each; empty if nothing does."""
        found = list(self.losses)
        if not self.model.has_steps:
            found.append("No step finished in the recording: the whole window counts as one step.")
        if self.model.unexplained > MOST_UNEXPLAINED:
            found.append(
                f"For {self.model.unexplained:.0%} of the time, no launch, stream or wait explains "
                "why a device event had not started: the low and the high saving differ by it."
            )
        waits = self.model.unknown_wait_ns / max(self.model.span_ns, 1)
        if waits > _MOST_UNKNOWN:
            found.append(
                f"For {waits:.0%} of the time, calls wait for device work that is not known; they "
                "count as CPU time."
            )
        if (self.model.work.kind == COMMUNICATION).any():
            found.append(
                "Other ranks are not in this capture: one bound assumes that they change alike, the "
                "other that they stay as they are."
            )
        return tuple(found)

    @cached_property
    def critical_path(self) -> Table:
        """What the step consists of; see `instrument.whatif.critical_path.CRITICAL_PATH`."""
        return critical_path(self.model, self.variants[0].costs)

    @cached_property
    def slack(self) -> Table:
        """How much longer each range could take; see `instrument.whatif.critical_path.SLACK`."""
        return slack(self.model, self.variants[0].costs)

    def profile(self, rows: int = 12) -> Table:
        """What each range and kernel would win; see `instrument.whatif.causal_profile`."""
        from instrument.whatif.causal_profile import causal_profile

        return causal_profile(self.model, self.variants[0].costs, rows=rows)

    def scale(
        self,
        *,
        range: str | None = None,
        operator: str | None = None,
        kernel: str | None = None,
        thread: str | None = None,
        by: float,
    ) -> Scenario:
        """Let a part of the program take `by` times as long as recorded.

        Give one of the four globs. Time that the CPU waits is never scaled; it follows.

        Args:
            range: ranges by name or path, with all that runs inside, their backward pass, and the
                device work that they launch.
            operator: operators or runtime calls by name, with all that runs inside, and the device
                work that they launch.
            kernel: kernels, copies and memsets by name.
            thread: threads as process/thread, and the device work that they launch.
            by: the factor, at least 0; 0.5 is twice as fast.

        Raises:
            ConfigError: not exactly one glob is given, it matches nothing, or `by` is negative.
        """
        chosen, text = self._select(range=range, operator=operator, kernel=kernel, thread=thread)
        _check_factor("by", by, least=0.0)
        return self._with(
            f"{text} × {by:g}", lambda costs, _: edits.scale(self.model, costs, chosen, by)
        )

    def scale_events(self, positions: Ints, by: float) -> Scenario:
        """Scale CPU events with all that runs inside and launches, and device events.

        Args:
            positions: positions in `capture.events`.
            by: the factor; 0 removes the events, with the waits inside them.

        Raises:
            ConfigError: `by` is negative.
        """
        _check_factor("by", by, least=0.0)
        chosen = selection.of_events(self.model, positions)
        text = f"{len(positions)} events × {by:g}"
        if by == 0:
            return self._with(text, lambda costs, _: edits.remove(self.model, costs, chosen))
        return self._with(text, lambda costs, _: edits.scale(self.model, costs, chosen, by))

    def remove(
        self,
        *,
        range: str | None = None,
        operator: str | None = None,
        kernel: str | None = None,
        thread: str | None = None,
        sync: str | None = None,
    ) -> Scenario:
        """Remove a part of the program with the waits in it; see `scale` for the globs.

        Args:
            range: as for `scale`.
            operator: as for `scale`.
            kernel: as for `scale`; the calls that launch these kernels go too.
            thread: as for `scale`.
            sync: calls that wait for the device, by their name or by an operator around them.

        Raises:
            ConfigError: not exactly one glob is given, or it matches nothing.
        """
        if sync is not None and not any((range, operator, kernel, thread)):
            calls = selection.calls_named(self.model, sync)
            waits = selection.of_events(self.model, calls)
            return self._with(
                f"no sync {sync}", lambda costs, _: edits.remove(self.model, costs, waits)
            )
        chosen, text = self._select(range=range, operator=operator, kernel=kernel, thread=thread)
        return self._with(f"no {text}", lambda costs, _: edits.remove(self.model, costs, chosen))

    def overlap(self, *, copy: str = "Memcpy*") -> Scenario:
        """Let copies run beside the computation, as pinned memory and `non_blocking=True` do.

        Raises:
            ConfigError: no copy matches.
        """
        rows = selection.by_copy(self.model, copy)
        return self._with(
            f"copies {copy} overlapped",
            lambda costs, modest: edits.overlap(self.model, costs, rows, modest=modest),
        )

    def asynchronous(self, *, sync: str = "*", positions: Ints | None = None) -> Scenario:
        """Let waiting calls return at once; what needed their result is assumed not to need it.

        Args:
            sync: calls by their name or by an operator around them, such as `aten::item`.
            positions: calls by their positions in `capture.events`, in place of `sync`.

        Raises:
            ConfigError: no call matches.
        """
        calls = selection.calls_named(self.model, sync) if positions is None else positions
        text = f"{len(calls)} calls asynchronous" if positions is not None else f"no wait in {sync}"
        return self._with(text, lambda costs, _: edits.asynchronous(self.model, costs, calls))

    def fuse(self, *, range: str) -> Scenario:
        """Fuse the operators of ranges, as `foreach` and fused optimizers do; see `edits.fuse`.

        Raises:
            ConfigError: no range matches.
            CaptureError: the range has no operators.
        """
        chosen = selection.by_range(self.model, range)
        return self._with(
            f"range {range} fused",
            lambda costs, modest: edits.fuse(self.model, costs, chosen, modest=modest),
        )

    def graph_launch(self, *, range: str) -> Scenario:
        """Launch each call of some ranges as one CUDA graph; see `edits.graph_launch`.

        Raises:
            ConfigError: no range matches.
            CaptureError: the range launches no device work.
        """
        chosen = selection.by_range(self.model, range)
        return self._with(
            f"range {range} as a graph",
            lambda costs, modest: edits.graph_launch(self.model, costs, chosen, modest=modest),
        )

    def workers(self, count: int) -> Scenario:
        """Load batches in `count` worker processes; see `edits.workers`.

        Raises:
            ConfigError: `count` is not positive.
            CaptureError: no loader works in the training process.
        """
        if count < 1:
            raise ConfigError(f"workers is {count}; give a positive number.")
        return self._with(
            f"{count} workers",
            lambda costs, modest: edits.workers(self.model, costs, count, modest=modest),
        )

    def bandwidth(self, factor: float) -> Scenario:
        """Multiply the bandwidth between ranks; see `edits.bandwidth`.

        Raises:
            ConfigError: `factor` is not positive.
            CaptureError: the capture has no communication.
        """
        _check_factor("bandwidth", factor, least=1e-9)
        return self._with(
            f"bandwidth × {factor:g}",
            lambda costs, _: edits.bandwidth(self.model, costs, factor),
        )

    def _with(self, text: str, edit: Callable[[Costs, bool], Costs]) -> Scenario:
        changed = tuple(
            replace(variant, costs=edit(variant.costs, variant.is_modest))
            for variant in self.variants
        )
        return Scenario(self.model, (*self.edits, text), changed, self.losses)

    def _select(self, **globs: str | None) -> tuple[Selection, str]:
        given = {name: glob for name, glob in globs.items() if glob is not None}
        if len(given) != 1:
            names = ", ".join(_AXES)
            raise ConfigError(f"{len(given)} of {names} are given; give exactly one.")
        ((name, glob),) = given.items()
        find = {
            "range": selection.by_range,
            "operator": selection.by_operator,
            "kernel": selection.by_kernel,
            "thread": selection.by_thread,
        }[name]
        return find(self.model, glob), f"{name} {glob}"

    def _steps(self, variant: _Variant) -> list[int]:
        times = self.model.program.run(self.model.weights(variant.costs))
        found: list[int] = np.rint(self.model.steps_ns(times)).astype(np.int64).tolist()
        return found

    def __repr__(self) -> str:
        changes = ", ".join(self.edits) or "as recorded"
        return f"<Scenario: {changes}; step {duration(self.step_ns)}>"


def scenario(capture: Views) -> Scenario:
    """Return a capture's scenario without edits.

    Raises:
        CaptureError: the trace has no CPU events, or is too long to simulate.
        TraceError: the trace cannot be read.
    """
    found = model(capture.links, capture.work)
    if not len(found.moments.step_end):
        raise CaptureError(
            "The trace has no CPU events, so no step can be simulated: record with "
            "profiler.activities=[cpu,cuda]."
        )
    losses = tuple(
        f"Coverage: {row.name} {'unknown' if row.share is None else f'{row.share:.0%}'}."
        for row in incomplete(capture, coverage_rows.STEPS)
    )
    return Scenario(found, (), _variants(found), losses)


def _variants(found: Model) -> tuple[_Variant, ...]:
    """The assumptions: as recorded, modest edits, usual delays alone, other ranks as they are."""
    variants = [
        _Variant(found.measured),
        _Variant(found.measured, is_modest=True),
        _Variant(found.typical),
    ]
    if (found.work.kind == COMMUNICATION).any():
        variants.append(_Variant(edits.others_stay(found, found.measured)))
    return tuple(variants)


def _typical(steps: list[int]) -> int:
    return int(median(steps[1:] or steps))


def _check_factor(name: str, factor: float, least: float) -> None:
    if not least <= factor < float("inf"):
        raise ConfigError(f"{name} is {factor:g}; give a number of at least {least:g}.")
