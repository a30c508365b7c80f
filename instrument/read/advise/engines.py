"""Inference engines: decode without a CUDA graph, beside decode in graphs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from instrument.base.units import counted
from instrument.read.advise.check import Check, NotApplicable, Problem
from instrument.read.advise.engine_options import SIZES
from instrument.read.advise.finding import Evidence
from instrument.read.facts.grammars import DECODE, VERIFY
from instrument.read.views.coverage_rows import LAUNCHING
from instrument.read.views.phases import engine_of, step_times
from instrument.read.views.views import Views


def eager_decode(capture: Views) -> Iterator[Problem]:
    """Find decode steps that launch their kernels one by one, where others replay a CUDA graph.

    The saving is what they take longer than the median of the others. It may be 0, because their
    batches may be larger.

    Raises:
        NotApplicable: no engine annotated steps.
    """
    engine, every = engine_of(capture), step_times(capture)
    if engine is None:
        raise NotApplicable
    steps = every.filter(pl.col("stage").is_in([DECODE, VERIFY]))
    eager, others = steps.filter(~pl.col("is_replayed")), steps.filter("is_replayed")
    if not len(eager) or not len(others):
        return
    eager_ns, others_ns = (each["step_ns"].to_numpy() for each in (eager, others))
    longer_ns = np.maximum(eager_ns - np.median(others_ns), 0).sum()
    whole_ns = max(int(every["step_ns"].sum()), 1)
    sizes = [_requests(each) for each in (eager, others)]
    which = f", with {sizes[0]}; the others have {sizes[1]}" if all(sizes) else ""
    saves = float(longer_ns / whole_ns)
    yield Problem(
        f"{len(eager)} of {counted(len(steps), 'decode step')} without a CUDA graph{which}",
        share=int(eager_ns.sum()) / whole_ns,
        saves=(saves, 0.0, saves),
        evidence=(
            Evidence("steps without a graph", len(eager), int(eager_ns.sum())),
            Evidence("steps with a graph", len(others), int(others_ns.sum())),
        ),
        change=f"Capture graphs for these batches, too: {SIZES[engine]}.",
    )


EAGER_DECODE = Check(
    "eager-decode",
    eager_decode,
    title="{share} of the {step} goes to {what}",
    verify="--phases --cuda-graphs",
    least_share=0.05,
    coverage=LAUNCHING,
)


def _requests(steps: pl.DataFrame) -> str:
    """How many requests these steps have; "" if it is not known."""
    found = steps["requests"].to_list()
    if None in found:
        return ""
    low, high = min(found), max(found)
    return f"{low} requests" if low == high else f"{low} to {high} requests"
