"""Checks of the samples of a whole run: waits, other threads, loader workers, and what grows."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.base.units import duration, percent, size
from instrument.read.advise.check import Check, Problem, samples_of_run
from instrument.read.facts.lines import function_of
from instrument.read.trace.line_samples import LineSamples
from instrument.read.views.lines import share_interval
from instrument.read.views.views import Views

# A line must have so large a share with 95 % certainty.
_LEAST_SHARE = 0.03
# Another thread is named if it used a CPU for this part of the run.
_LEAST_USED = 0.1
# What a thread does while it uses no CPU, and what to change.
_ELSEWHERE = "Do this in another thread, or less often."
_WAITS = {
    "sleep": ("sleeps", "Remove the sleep, or do what follows it in another thread."),
    "read": ("waits for a file or a pipe", f"Read once and keep the result. {_ELSEWHERE}"),
    "write": ("writes a file", f"Do not call fsync. {_ELSEWHERE}"),
    "network": ("waits for the network", _ELSEWHERE),
    "process": ("waits for another process", _ELSEWHERE),
    "poll": ("waits for the network or another process", _ELSEWHERE),
    "thread": ("waits for another thread", "Let the other thread prepare more ahead."),
    "other": ("waits in a call of the system", _ELSEWHERE),
}
# What others do meanwhile may take as long without the wait.
_OPERATOR, _OF_OTHERS = "operator", ("process", "poll", "thread")
# A trend needs so many parts of the run, Kendall's statistic in so many standard errors, and growth
# by this factor. It must go on: the second half has this part of the growth of the first half.
_LEAST_PARTS, _LEAST_Z, _LEAST_GROWTH, _GOES_ON = 5, 2.4, 1.25, 0.25
_LEAST_MEMORY, _SOON_S, _HOUR_NS = 64 << 20, 600, 3600 * 10**9
# The steps of a detail window, and the step in which it is saved.
_DETAILED = 3


def _is_wait(found: LineSamples, stack: int, cause: str) -> bool:
    """Whether a wait is the program's own, and not one of torch or a loader."""
    frames = found.stacks[stack]
    is_torchs = not frames or found.is_in_torch(stack) or found.loads(stack)
    return cause != _OPERATOR and not is_torchs


def waiting(capture: Views) -> Iterator[Problem]:
    """Find the lines in which the thread of the steps uses no CPU: files, locks, sleeps."""
    found, whole = samples_of_run(capture, on_cpu=True)
    phase = capture.phase
    # by line: what it waits for, in which function of a library
    causes = defaultdict[int, Counter[tuple[str, str | None]]](Counter)
    every, waits = Counter[int](), Counter[int]()
    for _, stack, count in found.of_phase(phase):
        every[stack] += count
    for _, its_phase, cause, stack, count in found.waits:
        if its_phase == phase and _is_wait(found, stack, cause):
            frame, library = found.blamed(stack)
            if found.frames[frame][0] != "user":  # such as an import
                continue
            causes[frame][cause if cause in _WAITS else "other", library] += count
            waits[stack] += count
    # where a call mostly waits, its other samples are of a thread that is to go on, but has no CPU
    late = Counter[int]()
    for stack, count in waits.items():
        late[found.blamed(stack)[0]] += (every[stack] - count) * (3 * count >= every[stack])
    busiest = _busiest(found)
    for frame, of_causes in sorted(causes.items(), key=lambda each: -each[1].total()):
        low, _ = share_interval(of_causes.total(), whole)
        share = (of_causes.total() + late[frame]) / whole
        _, high = share_interval(round(share * whole), whole)
        (cause, library), _ = of_causes.most_common(1)[0]
        if low is None or high is None or low < _LEAST_SHARE:
            continue
        place, (does, change) = found.place_of(frame), _WAITS[cause]
        meanwhile, calls = "", f" in {library}" if library else ""
        if cause == "thread" and busiest is not None:
            meanwhile = f", while {busiest.name!r} runs {busiest.place}"
        yield Problem(
            f"{does}{meanwhile}: {place}{calls}",
            share=share,
            place=(None, place),
            variant=place,
            change=change,
            saves=(share, 0.0 if cause in _OF_OTHERS else low, high),
        )


WAITING = Check(
    "waiting",
    waiting,
    title="For {share} of the run, the thread of the steps {what}",
    verify="--lines",
    least_share=0.05,
)


class _Busy(NamedTuple):
    """The other thread of Python that used the CPU most, as a share of the run; where it was."""

    name: str
    share: float
    place: str


def _busiest(found: LineSamples) -> _Busy | None:
    if len(found.marks) < 2 or not found.used_ns:
        return None
    name = max(found.used_ns, key=lambda each: found.used_ns[each])
    frames = Counter[int]()
    for _, _, thread, stack, count in found.counts:
        if thread == name and found.stacks[stack]:
            frames[found.blamed(stack)[0]] += count
    share = found.used_ns[name] / max(found.marks[-1][0] - found.marks[0][0], 1)
    if not frames or share < _LEAST_USED:
        return None
    return _Busy(name, share, found.place_of(frames.most_common(1)[0][0]))


def busy_thread(capture: Views) -> Iterator[Problem]:
    """Find another Python thread that uses the CPU while the thread of the steps waits for the GIL.

    The share is the time in which the thread of the steps neither ran, nor was ready to run, nor
    waited in a line of its own.
    """
    found, _ = samples_of_run(capture, on_cpu=True)
    if (busiest := _busiest(found)) is None:
        return
    begin, end = found.marks[0], found.marks[-1]
    elapsed_ns, _, ran_ns, queued_ns, _ = (after - before for before, after in zip(begin, end))
    waits = sum(
        count
        for _, _, cause, stack, count in found.waits
        if cause == _OPERATOR or found.loads(stack) or _is_wait(found, stack, cause)
    )
    whole = sum(each[4] for each in found.counts if not each[2])
    share = 1 - (ran_ns + queued_ns) / max(elapsed_ns, 1) - waits / max(whole, 1)
    if ran_ns and share > 0:
        yield Problem(
            f"{busiest.name!r}, which holds the GIL: it uses a CPU for "
            f"{percent(min(busiest.share, 1))} of the run",
            share=share,
            place=(None, busiest.place),
            saves=(share, share / 2, share),
        )


BUSY_THREAD = Check(
    "busy-thread",
    busy_thread,
    title="For {share} of the run, the thread of the steps waits for the thread {what}",
    change="Let this thread wait for an event instead of asking in a loop, or move its work into "
    "another process.",
    verify="--lines",
    least_share=0.1,
)


def worker_start(capture: Views) -> Iterator[Problem]:
    """Find the time in which loader workers start and end, as non-persistent ones in each epoch."""
    (found, whole), starts, loads = samples_of_run(capture), Counter[str](), 0
    for _, stack, count in found.of_phase(capture.phase):
        loads += count * found.loads(stack)
        if _starts_workers(found, stack):
            starts[found.place_of(found.blamed(stack)[0])] += count
    low, high = share_interval(starts.total(), whole)
    loader = capture.loader
    if loader is not None and loader.persistent_workers is not False:
        return
    if starts and low is not None and high is not None and low >= _LEAST_SHARE / 2:
        share, place = starts.total() / whole, starts.most_common(1)[0][0]
        # the first batches of new workers come late, too
        saves = min(1.5 * share, loads / whole), low, max(loads / whole, high)
        yield Problem(share=share, place=(None, place), variant=place, saves=saves)


WORKER_START = Check(
    "worker-start",
    worker_start,
    title="{share} of the run goes to the start and the end of loader workers",
    change="DataLoader(..., persistent_workers=True) keeps the workers from epoch to epoch; the "
    "first batch of an epoch then comes sooner, too.",
    verify="--lines",
    least_share=0.03,
)


def _starts_workers(found: LineSamples, stack: int) -> bool:
    names = {found.frames[frame][3].rpartition(".")[2] for frame in found.stacks[stack]}
    starts = "_get_iterator" in names and ("start" in names or "__init__" in names)
    return found.loads(stack) and (starts or "_shutdown_workers" in names)


class _Trend(NamedTuple):
    """A straight line through the values of parts of the run, at its first and last part."""

    first: float
    last: float
    slope: float


def _trend(x: NDArray[np.float64], y: NDArray[np.float64]) -> _Trend | None:
    """The line by Theil and Sen; None unless the values grow, and go on growing."""
    n = len(x)
    if n < _LEAST_PARTS:
        return None
    pairs = [(y[j] - y[i], x[j] - x[i]) for i, j in combinations(range(n), 2)]
    z = sum(np.sign(dy) for dy, _ in pairs) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    slope = median([dy / dx for dy, dx in pairs if dx > 0] or [0.0])
    level = median(y - slope * x)
    middle, third = median(y[n // 3 : n - n // 3]), max(n // 3, 1)
    before, after = middle - median(y[:third]), median(y[-third:]) - middle
    if z < _LEAST_Z or after < _GOES_ON * before:
        return None
    return _Trend(level + slope * x[0], level + slope * x[-1], slope)


class _Parts(NamedTuple):
    """The whole parts of a run with steps of a phase; none warms up, or is in the window."""

    number: NDArray[np.int64]
    step: NDArray[np.float64]  # in the middle of the part
    steps: NDArray[np.float64]
    ns: NDArray[np.float64]  # the time of the phase, without waits for a CPU
    memory_bytes: NDArray[np.float64]


def _parts(found: LineSamples, capture: Views) -> _Parts | None:
    phase, window = capture.phase, capture.about.window
    first = window.first_step or 0
    last = first + (window.steps or 0) + _DETAILED  # recorded steps take longer
    of_phase, of_all = Counter[int](), Counter[int]()
    for part, its_phase, thread, _, count in found.counts:
        of_all[part] += count * (not thread)
        of_phase[part] += count * (not thread and its_phase == phase)
    rows = []
    for part, (now, then) in enumerate(pairwise(found.first_steps)):
        if not part or phase not in now or phase not in then or part + 1 >= len(found.marks):
            continue
        (began_ns, *_, queued_before, memory), (ended_ns, *_, queued_after, _) = found.marks[
            part : part + 2
        ]
        if now[phase] < last and then[phase] > first:
            continue
        steps = then[phase] - now[phase]
        ran_ns = ended_ns - began_ns - (queued_after - queued_before)
        ns = ran_ns * of_phase[part] / max(of_all[part], 1)
        if steps > 0 and ns > 0:
            rows.append((part, now[phase] + steps / 2, steps, ns, memory))
    return _Parts(*map(np.array, zip(*rows))) if len(rows) >= _LEAST_PARTS else None


def growth(capture: Views) -> Iterator[Problem]:
    """Find steps that take longer and longer, and memory that grows all the time."""
    (found, _), phase = samples_of_run(capture), capture.phase
    if (parts := _parts(found, capture)) is None:
        return
    trend = _trend(parts.step, parts.ns / parts.steps)
    if trend is not None and trend.first > 0 and trend.last >= _LEAST_GROWTH * trend.first:
        place = _growing_place(found, phase, parts, trend.last - trend.first)
        later_ns = math.sqrt(trend.last**2 + 2 * trend.slope * _HOUR_NS)
        where = f" in {place}" if place else ""
        share = 1 - trend.first / (parts.ns.sum() / parts.steps.sum())
        yield Problem(
            f"A step takes longer and longer{where}: {duration(trend.first)} at step "
            f"{parts.step[0]:,.0f}, {duration(trend.last)} at step {parts.step[-1]:,.0f}, and "
            f"{duration(later_ns)} an hour later",
            share=share,
            place=(None, place),
            variant="time",
            change="Look for what each step adds to: a list or table that is gone through again "
            "(keep a running sum or the last values), or hooks and callbacks that are registered "
            "again. If the batches are meant to grow, this is no problem.",
            saves=(share, share / 2, min(1.2 * share, 1)),
        )
    yield from _memory(capture, parts)


def _memory(capture: Views, parts: _Parts) -> Iterator[Problem]:
    trend = _trend(parts.step, parts.memory_bytes)
    if trend is None or trend.last - trend.first < _LEAST_MEMORY:
        return
    step_ns = parts.ns.sum() / parts.steps.sum()
    free = (capture.about.machine.memory_bytes or 0) - parts.memory_bytes[-1]
    left_s = free / trend.slope * step_ns / 1e9
    full = f"; the machine's memory is full after {duration(left_s * 1e9)}" if free > 0 else ""
    yield Problem(
        f"The memory of the process grows by {size(trend.slope)} in each step: {size(trend.first)} "
        f"at step {parts.step[0]:,.0f}, {size(trend.last)} at step {parts.step[-1]:,.0f}{full}",
        place=(None, None),
        variant="memory",
        change="Keep loss.item() or loss.detach() instead of a tensor with its graph, and drop "
        "what later steps do not need. Memory that fills up to a bound is no problem.",
        ends_run=bool(0 < left_s < _SOON_S),
    )


def _growing_place(found: LineSamples, phase: str, parts: _Parts, grown_ns: float) -> str | None:
    """The line, or else the function, with at least a third of the growth of a step."""
    at = {number: row for row, number in enumerate(parts.number.tolist())}
    samples = defaultdict[int, NDArray[np.float64]](lambda: np.zeros(len(at)))
    for part, stack, count in found.of_phase(phase):
        if part in at:
            samples[found.blamed(stack)[0]][at[part]] += count
    each_ns = parts.ns / parts.steps / np.maximum(sum(samples.values()), 1)
    functions = defaultdict[tuple[str, str], list[int]](list)
    for frame in samples:
        if frame >= 0:
            _, file, _, function = found.frames[frame]
            functions[file, function].append(frame)
    for frames in ([[each] for each in samples if each >= 0], [*functions.values()]):
        grown = [_trend(parts.step, sum(samples[each] for each in of) * each_ns) for of in frames]
        grows = [(row.last - row.first, of) for row, of in zip(grown, frames) if row is not None]
        most_ns, of = max(grows, key=lambda pair: pair[0], default=(0.0, []))
        if of and most_ns >= grown_ns / 3:
            place = found.place_of(of[0])
            return place if len(of) == 1 else function_of(place)
    return None


GROWTH = Check("growth", growth, verify="--lines", least_share=0.05)
