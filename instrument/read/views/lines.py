"""The lines that a run executed, by samples of its stacks (`profiler.lines`)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.base.prose import shortened
from instrument.base.units import percent
from instrument.read.facts.schema import Schema, schema
from instrument.read.trace.events import OPERATOR
from instrument.read.trace.line_samples import LineSamples
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
    operator="the outermost operator that ran in most of the samples that lie in the window; None "
    "where none did",
)
# The sentence on the lines has at most so many, each with at least this share.
_MOST_ROWS, _LEAST_SHARE, _LONGEST_NAME = 3, 0.1, 44
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
    samples = Counter[tuple[int, str]]()
    libraries = defaultdict[tuple[int, str], Counter[str | None]](Counter)
    blamed = [*map(found.blamed, range(len(found.stacks)))]
    for _, its_phase, thread, stack, count in found.counts:
        if its_phase == phase:
            frame, library = blamed[stack]
            samples[frame, thread] += count
            libraries[frame, thread][library] += count
    steps = sum(count for (_, thread), count in samples.items() if not thread)
    operators = _operators(capture, found, [frame for frame, _ in blamed])
    order = sorted(samples, key=lambda key: (-samples[key], key))
    shares = [samples[key] / steps if steps else None for key in order]
    intervals = [_interval(samples[key], steps) for key in order]
    frames = [found.frames[frame] if frame >= 0 else None for frame, _ in order]
    return Table.of(
        LINES,
        {
            "line": [f"{each[1]}:{each[2]}" if each else None for each in frames],
            "function": [each[3] if each else None for each in frames],
            "thread": [thread or None for _, thread in order],
            "samples": [samples[key] for key in order],
            "share": shares,
            "low_share": [low for low, _ in intervals],
            "high_share": [high for _, high in intervals],
            "library": [libraries[key].most_common(1)[0][0] for key in order],
            "operator": [None if thread else operators.get(frame) for frame, thread in order],
        },
    )


class HeavyLine(NamedTuple):
    """A line, and how much of a step it takes.

    Attributes:
        line: the file and the line, such as "train.py:31".
        function: the function of the line.
        share: the share of a step, with that of the backward if `is_backward_included`.
        low, high: the 95 % interval of the share.
        operators: the outermost operators that the line calls, the longest first; at most three.
        is_backward_included: whether the backward of these operators counts here. It then does not
            count for the line that calls `backward`.
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
    return [
        HeavyLine(
            row.line, row.function, row.share, row.low_share, row.high_share,
            (row.operator,) if row.operator else (), False,
        )
        for row in capture.lines.where("thread IS NULL AND line IS NOT NULL")
    ]  # fmt: skip


def largest_lines(capture: Views) -> str:
    """Return a sentence with the lines that take most of the run, at most three; "" if unknown."""
    found = capture.lines
    shown = []
    for row in found.where("thread IS NULL AND line IS NOT NULL").head(_MOST_ROWS):
        if row.share >= _LEAST_SHARE:
            half = math.ceil(max(row.high_share - row.share, row.share - row.low_share) * 100)
            called = (row.library or "").partition(" (")[0]
            place = f"{row.line} ({shortened(called, _LONGEST_NAME)})" if called else row.line
            shown.append(f"{percent(row.share)} ± {half} at {place}")
    return f"By samples of the whole run: {', '.join(shown)}." if shown else ""


def _operators(capture: Views, found: LineSamples, blamed: list[int]) -> dict[int, str]:
    """For each frame, the outermost operator that ran in most of its samples in the window."""
    links = capture.links
    events, tree = links.events, links.call_tree
    threads = np.unique(events.thread[links.steps])
    if len(threads) != 1 or not found.times or not len(tree):
        return {}
    times = np.array(found.times, np.int64)
    at_ns = times[:, 0] - events.base_ns
    inside = (at_ns >= events.begin_ns) & (at_ns <= events.end_ns.max())
    at_ns, stacks = at_ns[inside], times[inside, 1]
    node = tree.node_at(np.full(len(at_ns), threads[0]), at_ns)
    outermost = np.flatnonzero(tree.outermost(events.among(OPERATOR)[tree.index]))
    ran = np.append(outermost, -1)[tree.nearest_of(outermost, node)]
    running = defaultdict[int, Counter[str | None]](Counter)
    for stack, operator in zip(stacks.tolist(), ran.tolist()):
        name = events.names[events.name[tree.index[operator]]] if operator >= 0 else None
        running[blamed[stack]][name] += 1
    most = {frame: names.most_common(1)[0][0] for frame, names in running.items()}
    return {frame: name for frame, name in most.items() if name is not None}


def _interval(samples: int, of: int) -> tuple[float | None, float | None]:
    """The 95 % interval of a share by Wilson's formula, which holds for few samples too."""
    if not of:
        return None, None
    share = min(samples / of, 1.0)
    middle = share + _Z**2 / (2 * of)
    half = _Z * math.sqrt(share * (1 - share) / of + (_Z / (2 * of)) ** 2)
    scale = 1 + _Z**2 / of
    return (middle - half) / scale, (middle + half) / scale
