"""torch.compile: compiles again and again; breaks the graph."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from instrument.base.range_names import REGION
from instrument.base.units import counted, percent
from instrument.read.advise.check import RECORD_AGAIN, RECORD_STEPS, Check, NotRecorded, Problem
from instrument.read.advise.evidence import evidence, in_steps, share_with_device
from instrument.read.advise.finding import Evidence
from instrument.read.trace.events import ANNOTATION, OPERATOR, Ints
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.interruptions import is_compilation
from instrument.read.views.views import Views

# torch opens these events around each compilation. Inside are events of the parts of the
# compilation, whose names end with "(dynamo_timed)".
_AROUND = frozenset({"dynamo", "entire_frame_compile"})
# For example, "entire_frame_compile_data: …, compile_id=0/2" is the third compilation of frame 0:
# above 0, a guard failed because a shape, a number or an object changed.
_AGAIN = re.compile(r"entire_frame_compile_data: .*compile_id=(?:!\d+/)?\d+/0*[1-9]")
_MOST_REASONS, _LONGEST_REASON = 5, 200
_CHANGE = (
    "torch.compile(…, dynamic=True), or torch._dynamo.mark_dynamic(tensor, dim) for the "
    "dimension that changes; in compiled functions, do not use Python numbers and objects that "
    "change"
)
_UNNAMED = '; TORCH_LOGS="recompiles" prints the guard that fails'


def recompilation(capture: Views) -> Iterator[Problem]:
    """Find the compilations after the first step, or their number in `capture.json`.

    torch before 2.6 records no events of compilations: then no saving is known.
    """
    events, steps, dynamo = capture.events, capture.links.counted_steps, capture.about.dynamo
    found = _compilations(capture)
    if len(found) and len(capture.links.steps) < 2:
        raise NotRecorded(
            "torch.compile compiles in the window, but a window with fewer than two finished steps "
            "does not show whether it compiles again",
            RECORD_STEPS,
        )
    guards = _reasons("failed guard", (dynamo and dynamo.failed_guards) or {})
    change = _CHANGE if guards else _CHANGE + _UNNAMED
    inside = found[steps.within(events.start_ns[found], events.end_ns[found]) > 0]
    if len(found):
        is_again = events.named(lambda name: _AGAIN.match(name) is not None)
        count = len(in_steps(capture, np.flatnonzero(events.among(ANNOTATION) & is_again)))
        again = f", {count} of them again after a failed guard" if count else ""
        share = share_with_device(capture, inside)
        yield Problem(
            f"compiles in the window: {percent(share)} of the {steps.what}, {len(inside)} "
            f"compilations{again}",
            inside,
            share,
            evidence=evidence(capture, inside) + guards,
            change=change,
        )
    elif dynamo and dynamo.recompilations:
        times = counted(dynamo.recompilations, "time")
        yield Problem(
            f"compiled functions again {times} in the window",
            evidence=(Evidence("recompilation", dynamo.recompilations), *guards),
            change=change,
        )


RECOMPILATION = Check(
    "recompilation",
    recompilation,
    title="torch.compile {what}",
    verify="--interruptions",
    least_share=0.01,
    factor=0,
    coverage=(CPU_IN_STEPS,),
)


def graph_breaks(capture: Views) -> Iterator[Problem]:
    """Find the graph breaks that `capture.json` counts; one is enough.

    No saving is simulated, because a trace does not show how long a single graph would take.
    """
    dynamo = capture.about.dynamo
    breaks = None if dynamo is None else dynamo.graph_breaks
    if breaks is None and capture.events.named(lambda name: name.startswith(REGION)).any():
        raise NotRecorded("the capture does not count graph breaks", RECORD_AGAIN)
    if breaks:
        graphs = f" and {dynamo.graphs} graphs" if dynamo and dynamo.graphs else ""
        yield Problem(
            f"{sum(breaks.values())} graph breaks{graphs}", evidence=_reasons("graph break", breaks)
        )


GRAPH_BREAKS = Check(
    "graph-breaks",
    graph_breaks,
    title="torch.compile breaks the graph: {what} in the window",
    change="torch.compile(…, fullgraph=True) raises at the first break: move the code that "
    "breaks the graph (printing, .item(), other libraries) out of the compiled function",
    verify='TORCH_LOGS="graph_breaks" prints each break with its line',
)


def _reasons(name: str, counts: Mapping[str, int]) -> tuple[Evidence, ...]:
    """Make rows of evidence, named `name`, for the most frequent reasons in `counts`."""
    # A text such as "(other reasons)" comes last.
    order = sorted(counts, key=lambda reason: (reason.startswith("("), -counts[reason]))
    return tuple(
        Evidence(name, counts[reason], detail=" ".join(reason.split())[:_LONGEST_REASON])
        for reason in order[:_MOST_REASONS]
    )


def _compilations(capture: Views) -> Ints:
    """The outermost events in which torch.compile compiles, on any thread, sorted by start."""
    events, tree = capture.events, capture.links.call_tree
    is_operator = events.among(OPERATOR)[tree.index]
    timed = events.named(is_compilation)[tree.index]
    timed &= is_operator | events.among(ANNOTATION)[tree.index]
    holds_timed = tree.with_descendants(timed.astype(np.int64)) > 0
    around = events.named(_AROUND.__contains__)[tree.index] & is_operator & holds_timed
    found: Ints = tree.index[tree.outermost(timed | around)]
    return found[np.argsort(events.start_ns[found], kind="stable")]
