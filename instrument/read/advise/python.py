"""The parts of a step that do not train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.check import ONE_STEP, Check, Problem
from instrument.read.advise.evidence import evidence
from instrument.read.facts.intervals import interval_at
from instrument.read.facts.links import thread_of_steps
from instrument.read.facts.places import common_place
from instrument.read.facts.step_index import step_at
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.untrained import EVAL, LEAST_PART, Part, untrained_parts
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Edit

_FEW_CALLS = 4  # in eval mode, in a step; after more of them, training may need their results
_ONCE = (
    "{change}. In this window it occurs once, which does not show how often it occurs: if it is in "
    "one of many steps, it costs little."
)


def not_training(capture: Views) -> Iterator[Problem]:
    """Find the parts of the steps that do not train; the simulation leaves them out.

    The saving is unknown if a part occurs only in one of several steps, or if a step calls a model
    in eval mode many times.
    """
    steps = capture.links.counted_steps
    for part in untrained_parts(capture):
        at = steps.holds(part.spans[0])
        holding = len(np.unique(at[at >= 0]))
        often = f"{(at >= 0).sum() / holding:,.0f}× a step"
        if holding < steps.count:
            often = f"in {holding} of {steps.count} steps"
        every = step_at(capture.events, capture.links.steps, part.spans[0])
        is_once = len(capture.links.steps) > 1 and len(np.unique(every[every >= 0])) == 1
        may_train = part.change == EVAL and (at >= 0).sum() > _FEW_CALLS * holding
        share, place = steps.covered(*part.spans), common_place(capture, part.events)
        yield Problem(
            f"{percent(share)} of the {steps.what} goes to {part.name}"
            f"{'' if may_train else ', not to training'}: {often}",
            part.events,
            None if is_once else share,
            edit=None if is_once or may_train else _without(capture, part),
            place=(place[0] if part.is_range else None, place[1]),
            evidence=evidence(capture, part.events),
            change=_ONCE.format(change=part.change) if is_once else f"{part.change}.",
            verify="--ranges" if part.is_range else "",
            is_large=is_once,
        )


NOT_TRAINING = Check(
    "not-training",
    not_training,
    verify="Record again: this finding must be gone.",
    least_share=LEAST_PART,
    lowest=LEAST_PART,
    least_saving=0.05,
    needs=(ONE_STEP,),
    coverage=(CPU_IN_STEPS,),
)


def _without(capture: Views, part: Part) -> Edit:
    """The step without the part, and without the device work that it launches."""
    if part.is_range:
        return lambda whatif: whatif.scale_events(part.events, by=0)
    tree, thread = capture.links.call_tree, thread_of_steps(capture.links)
    inside = (interval_at(part.spans, tree.start_ns) >= 0) & (tree.thread == thread)
    calls = tree.index[tree.outermost(inside)]
    return lambda whatif: whatif.scale_events(calls, by=0).scale_spans(thread, part.spans, by=0)
