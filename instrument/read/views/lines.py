"""The lines that a run executed, by samples of its stacks (`profiler.lines`)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from instrument.read.facts.schema import Schema, schema
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

LINES: Schema = schema(
    line="the file and the line: the innermost of the user's own code in the stack, and the "
    "innermost of a library where no user's code is in it",
    function="the function of the line",
    thread="the name of the thread; None for the thread that takes the steps. Other threads are "
    "sampled while they use the CPU, on Linux",
    samples="how many samples found the thread there, in the phase of this capture. Samples are "
    "taken every 10 ms on the average, in the whole run after its first step",
    share="the share of all samples of the thread that takes the steps. More than one thread may "
    "be busy at a time",
    low_share="the lower end of the 95 % interval of the share",
    high_share="the upper end of the 95 % interval of the share",
    library="the function of a library that the line called in most of these samples; None where "
    "the line itself, or an operator of torch, was running in most of them",
    operator="the operator with the longest CPU time, without operators inside it, of those that "
    "the line calls in the window, apart from their backward; None if none is known",
    with_backward_share="`share` with that of the backward of the operators that the line called. "
    "The samples in the backward are divided as its CPU time in the window: from the line that "
    "calls `backward`, they count for the lines of the forward, as far as these are known. None if "
    "none is, and for other threads",
)
# The sentence on the lines has at most so many, each with at least this share.
_MOST_ROWS, _LEAST_SHARE, _LONGEST_NAME = 3, 0.1, 44
# Operators with a smaller share of the time of their line say nothing of it.
_TRIVIAL = 0.2
# Two standard errors.
_Z = 1.96


def lines(capture: Views) -> Table:
    """Return the lines that ran in most samples first; see `LINES`. None were without samples.

    Raises:
        CaptureError: the file of the lines cannot be read, or is not one.
    """
    if (found := capture.line_samples) is None:
        return Table.of(LINES, {column.name: [] for column in LINES})
    phase = capture.phase
    samples, in_backward = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    libraries = defaultdict[tuple[int, str], Counter[str | None]](Counter)
    blamed = [*map(found.blamed, range(len(found.stacks)))]
    for _, its_phase, thread, stack, count in found.counts:
        if its_phase == phase:
            frame, library = blamed[stack]
            samples[frame, thread] += count
            in_backward[frame, thread] += count * found.is_backward(stack)
            libraries[frame, thread][library] += count
    steps = sum(count for (_, thread), count in samples.items() if not thread)
    order = sorted(samples, key=lambda key: (-samples[key], key))
    shares = [samples[key] / steps if steps else None for key in order]
    intervals = [share_interval(samples[key], steps) for key in order]
    frames = [found.frames[frame] if frame >= 0 else None for frame, _ in order]
    texts = [f"{each[1]}:{each[2]}" if each else None for each in frames]
    of_steps = {text: key for text, key in zip(texts[::-1], order[::-1]) if text and not key[1]}
    operators, backward = _called(capture)
    gained = {of_steps[line]: share for line, share in backward.items() if line in of_steps}
    whole, moved = sum(in_backward.values()), sum(gained.values())
    with_backward = [
        max(samples[key] - in_backward[key] * moved + whole * gained.get(key, 0), 0.0) / steps
        if whole * moved and not key[1]
        else None
        for key in order
    ]
    return Table.of(
        LINES,
        {
            "line": texts,
            "function": [each[3] if each else None for each in frames],
            "thread": [thread or None for _, thread in order],
            "samples": [samples[key] for key in order],
            "share": shares,
            "low_share": [low for low, _ in intervals],
            "high_share": [high for _, high in intervals],
            "library": [libraries[key].most_common(1)[0][0] for key in order],
            "operator": [
                next(iter(operators[text])) if text in operators and not thread else None
                for text, (_, thread) in zip(texts, order)
            ],
            "with_backward_share": with_backward,
        },
    )


class HeavyLine(NamedTuple):
    """A line, and how much of a step it takes.

    Attributes:
        line: the file and the line, such as "train.py:31".
        function: the function of the line.
        share: the share of a step: `with_backward_share` of `LINES`, or `share` if that is unknown.
        low, high: the 95 % interval of the share.
        operators: the operators with the longest CPU time, without operators inside them, of those
            that the line calls in the window; at most three. If they take little of the line's
            time, the function of a library that it calls.
        is_backward_included: whether the share has some of the backward that these operators cause.
    """

    line: str
    function: str
    share: float
    low: float
    high: float
    operators: tuple[str, ...]
    is_backward_included: bool


def heaviest_lines(capture: Views) -> list[HeavyLine]:
    """Return the lines of the thread that takes the steps, the largest share first.

    Raises:
        CaptureError: the file of the lines cannot be read, or is not one.
    """
    rows = [*capture.lines.where("thread IS NULL AND line IS NOT NULL")]
    samples = sum(row.samples for row in capture.lines.where("thread IS NULL"))
    operators, _ = _called(capture)
    found = []
    for row in rows:
        share, interval = row.share, (row.low_share, row.high_share)
        if row.with_backward_share is not None:
            share = row.with_backward_share
            interval = share_interval(share * samples, samples)
        least_ns = _TRIVIAL * row.share * capture.links.counted_steps.total_ns
        library = (row.library or "").partition(" (")[0]
        named = [name for name, ns in operators.get(row.line, {}).items() if ns >= least_ns]
        called, gains = tuple(named or filter(None, [library])), share > row.share
        function = row.function.rpartition(".<locals>.")[2]
        found.append(HeavyLine(row.line, function, share, *interval, called, gains))
    return sorted(found, key=lambda each: -each.share)


def _called(capture: Views) -> tuple[dict[str, dict[str, int]], dict[str, float]]:
    """For each line, its operators with the longest CPU time, and its share of the backward."""

    def compute() -> tuple[dict[str, dict[str, int]], dict[str, float]]:
        rows = capture.rows("line", "name", "kind", "pass", "counted_own_ns")
        is_backward, ns = pl.col("pass").eq_missing("backward"), pl.sum("counted_own_ns")
        calls = rows.filter(~is_backward & (pl.col("kind") == "operator")).drop_nulls("line")
        order = calls.group_by("line", "name").agg(ns).sort("counted_own_ns", descending=True)
        called = defaultdict[str, dict[str, int]](dict)
        for line, name, own_ns in order.iter_rows():
            if len(called[line]) < _MOST_ROWS:
                called[line][name] = own_ns
        backward = rows.filter(is_backward)
        whole_ns = max(backward["counted_own_ns"].sum(), 1)
        divided = backward.drop_nulls("line").group_by("line").agg(ns / whole_ns)
        return called, dict(divided.rows())

    return capture.once("what lines call", compute)


def share_interval(samples: float, of: int) -> tuple[float | None, float | None]:
    """The 95 % interval of a share by Wilson's formula, which holds for few samples too."""
    if not of:
        return None, None
    share = min(samples / of, 1.0)
    middle = share + _Z**2 / (2 * of)
    half = _Z * math.sqrt(share * (1 - share) / of + (_Z / (2 * of)) ** 2)
    scale = 1 + _Z**2 / of
    # rounding may pass the ends
    return max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0)
