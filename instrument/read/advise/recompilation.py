"""`recompilation`: steps in which torch.compile compiles, although the program is warm.

Compilations after the first step count; `first-step` reports those of the first. torch writes the
number of each compilation of a Python frame into the trace: above 0, a guard failed because a
shape, a number or an object changed. The evidence names the failed guards if `capture.json` has
them. torch before 2.6 records no events of compilations: then `capture.json` is enough, and no
saving is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from instrument.base.units import counted, percent
from instrument.read.advise.check import RECORD_STEPS, Check, NotRecorded, Problem
from instrument.read.advise.evidence import evidence, share_with_device
from instrument.read.advise.finding import Evidence
from instrument.read.trace.events import ANNOTATION, OPERATOR, Ints
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.interruptions import is_compilation
from instrument.read.views.views import Views

# torch opens these events around each compilation. Inside are events of the parts of the
# compilation, whose names end with "(dynamo_timed)".
_AROUND = frozenset({"dynamo", "entire_frame_compile"})
# For example, "entire_frame_compile_data: …, compile_id=0/2" is the third compilation of frame 0.
_FRAME = re.compile(r"entire_frame_compile_data: .*compile_id=(?:!\d+/)?(\d+)/(\d+)")

_MOST_REASONS = 5
_LONGEST_REASON = 200
_UNNAMED = '; TORCH_LOGS="recompiles" prints the guard that fails'


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all compilations in the counted steps."""
    events, steps = capture.events, capture.links.counted_steps
    found = compilations(capture)
    inside = found[steps.within(events.start_ns[found], events.end_ns[found]) > 0]
    share = share_with_device(capture, inside)
    dynamo = capture.about.dynamo
    guards = reasons("failed guard", (dynamo and dynamo.failed_guards) or {})
    change = "" if guards else CHECK.change + _UNNAMED
    if len(found) and len(capture.links.steps) < 2:
        raise NotRecorded(
            "torch.compile compiles in the window, but a window with fewer than two finished steps "
            "does not show whether it compiles again",
            RECORD_STEPS,
        )
    if share >= CHECK.least_share:
        count = int((steps.holds(events.start_ns[frames_compiled_again(capture)]) >= 0).sum())
        again = f", {count} of them again after a failed guard" if count else ""
        yield Problem(
            f"torch.compile compiles in the window: {percent(share)} of the {steps.what}, "
            f"{len(inside)} compilations{again}",
            inside,
            share,
            evidence=evidence(capture, inside) + guards,
            change=change,
        )
    elif not len(found) and dynamo and dynamo.recompilations:
        yield Problem(
            "torch.compile compiled functions again "
            f"{counted(dynamo.recompilations, 'time')} in the window",
            evidence=(Evidence("recompilation", dynamo.recompilations), *guards),
            change=change,
        )


CHECK = Check(
    "recompilation",
    find,
    change="torch.compile(…, dynamic=True), or torch._dynamo.mark_dynamic(tensor, dim) for the "
    "dimension that changes; in compiled functions, do not use Python numbers and objects that "
    "change",
    verify="--interruptions",
    least_share=0.01,
    factor=0,
    coverage=(CPU_IN_STEPS,),
)


def reasons(name: str, counts: Mapping[str, int]) -> tuple[Evidence, ...]:
    """Make rows of evidence, named `name`, for the most frequent reasons in `counts`."""
    # A text such as "(other reasons)" comes last.
    order = sorted(counts, key=lambda reason: (reason.startswith("("), -counts[reason]))
    return tuple(
        Evidence(name, counts[reason], detail=" ".join(reason.split())[:_LONGEST_REASON])
        for reason in order[:_MOST_REASONS]
    )


def compilations(capture: Views) -> Ints:
    """The outermost events in which torch.compile compiles, on any thread, sorted by start."""
    events, tree = capture.events, capture.links.call_tree
    is_operator = events.among(OPERATOR)[tree.index]
    timed = events.named(is_compilation)[tree.index]
    timed &= is_operator | events.among(ANNOTATION)[tree.index]
    holds_timed = tree.with_descendants(timed.astype(np.int64)) > 0
    around = events.named(_AROUND.__contains__)[tree.index] & is_operator & holds_timed
    found: Ints = tree.index[tree.outermost(timed | around)]
    return found[np.argsort(events.start_ns[found], kind="stable")]


def frames_compiled_again(capture: Views) -> Ints:
    """The positions of the events in which torch compiles a Python frame again."""
    events = capture.events

    def is_again(name: str) -> bool:
        found = _FRAME.match(name)
        return found is not None and int(found[2]) > 0

    again: Ints = np.flatnonzero(events.among(ANNOTATION) & events.named(is_again))
    return again
