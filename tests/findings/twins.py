"""A twin is a program twice: with a problem, and without it. Both are recorded in turns, in one process.

On a shared machine, two processes that run the same program differ by a factor of two. So the slow and the fixed steps
take turns inside one recording, and `recorded` cuts its trace into the capture of the slow steps and that of the fixed
ones. Both programs so meet the same machine, and the difference of their median steps is what the fix really saves.
"""

from __future__ import annotations

import gzip
import json
import random
import shlex
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import builders
import msgspec
import numpy as np
import torch

from instrument import Capture, Session
from instrument.cli.command import main
from instrument.read.advise.check import Check, NotRecorded, run_check
from instrument.read.advise.diagnose import CHECKS, diagnose
from instrument.read.advise.finding import Finding, Saving
from instrument.read.advise.verdict import LEAST_SHARE, causes

ATTEMPTS = 3  # of a measurement, which other programs can spoil
WINDOWS = 2  # of each kind, where whole windows take turns


@dataclass(frozen=True)
class Twin:
    """A step with a problem, and the same step without it.

    Attributes:
        name: what tells this twin from the others, in a few words.
        slow, fixed: one step of each program. What they need, they make at their first call, and keep.
        code: the code of the finding on the slow program.
        steps: how many steps of each program are recorded in one window; the first of them does not count.
        options: options of the session, such as `with_stack`.
        turns: "step" if the two programs take turns at every step of one window. "window" if whole windows take turns:
            for problems that a step leaves to those after it (memory, workers), or that are recorded for a window.
            "written" if the programs return the events of traces that are written by hand.
        is_time: whether the problem is time that passes, of which the order of the events shows nothing.
        beside: what runs on the machine beside both programs.
        clean: one step of the program without the problem, where `fixed` removes only a part of it.
    """

    name: str
    slow: Callable[[], Any]
    fixed: Callable[[], Any]
    code: str
    steps: int = 8
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    turns: Literal["step", "window", "written"] = "step"
    is_time: bool = False
    beside: Callable[[], AbstractContextManager[None]] = nullcontext
    clean: Callable[[], object] | None = None

    def __str__(self) -> str:
        return f"{self.code}: {self.name}"


@dataclass(frozen=True)
class Recorded:
    """The captures of both programs of a twin, and the medians of all their recorded steps but the first ones."""

    slow: Capture
    fixed: Capture
    slow_ns: float
    fixed_ns: float

    @property
    def saving_ns(self) -> float:
        return self.slow_ns - self.fixed_ns


def recorded(twin: Twin, folder: Path) -> Recorded:
    """Run both programs of a twin in turns and record them."""
    if twin.turns == "written":
        slow, fixed = (
            builders.write_capture(folder, program(), name)
            for name, program in (("slow", twin.slow), ("fixed", twin.fixed))
        )
        return Recorded(slow, fixed, _median_ns([slow]), _median_ns([fixed]))
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # on a machine with other work, threads that wait for each other take turns at will
    try:
        for step in (twin.slow, twin.fixed):  # what happens once happens here
            step()
        by_turns = _step_by_step if twin.turns == "step" else _window_by_window
        with twin.beside():
            slow, fixed = by_turns(twin, folder)
    finally:
        torch.set_num_threads(threads)
    return Recorded(slow[-1], fixed[-1], _median_ns(slow), _median_ns(fixed))


def without_problem(twin: Twin, both: Recorded, folder: Path) -> Capture:
    """The capture of the program without the problem."""
    if twin.clean is None:
        return both.fixed
    return recorded(replace(twin, fixed=twin.clean), folder).fixed


def retimed(capture: Capture, folder: Path) -> Capture:
    """The same events in the same order, with 1 µs from each start or end to the next one: how fast the machine was is gone."""
    document = _document(capture)
    events = [event for event in document["traceEvents"] if "ts" in event and event["ph"] != "M"]
    times = np.array([[event["ts"], event["ts"] + event.get("dur", 0)] for event in events])
    starts, ends = np.unique(np.rint(times * 1000), return_inverse=True)[1].reshape(-1, 2).T
    for event, start, end in zip(events, starts.tolist(), ends.tolist(), strict=True):
        event["ts"] = start
        if "dur" in event:
            event["dur"] = end - start
    return _written(capture, document, folder)


def found(capture: Capture, code: str) -> list[Finding]:
    """The findings of one kind in a capture; none where the capture lacks what the check needs."""
    try:
        return [each.finding for each in run_check(check_of(code), capture, capture.whatif)]
    except NotRecorded:
        return []


def check_of(code: str) -> Check:
    return next(each for each in CHECKS if each.code == code)


def headline(capture: Capture) -> str:
    """The code of the finding that the log names first; "nothing" if there is none."""
    return next((each.code for each in causes(diagnose(capture))), "nothing")


def named(capture: Capture) -> list[Finding]:
    """What the log names as slow on a capture, without small savings and caveats."""
    found = causes(diagnose(capture))
    return [each for each in found if each.saving is None or each.saving.share >= LEAST_SHARE]


def assert_command_runs(finding: Finding) -> None:
    """Paste the command of a finding into a shell."""
    program, *command = shlex.split(finding.verify, comments=True)
    assert (program, main(command)) == ("instrument", 0)


def predicted(findings: Sequence[Finding]) -> Saving | None:
    """The largest saving of the findings; None if no saving could be simulated."""
    savings = [each.saving for each in findings if each.saving is not None]
    return max(savings, key=lambda saving: saving.saving_ns, default=None)


def _step_by_step(twin: Twin, folder: Path) -> tuple[list[Capture], list[Capture]]:
    """One window of pairs of steps, each pair in random order.

    In a fixed order, another program that gets the CPU at regular times can meet the same one of the two again and again.
    """
    chance, pair = random.Random(0), [True, False]
    is_slow = [False]  # the warm-up
    for _ in range(twin.steps):
        chance.shuffle(pair)
        is_slow += pair
    session = _session(twin, folder / "both", active=2 * twin.steps)
    with session:
        for slow in is_slow:
            (twin.slow if slow else twin.fixed)()
            session.step()
    (both,) = session.captures
    document = _document(both)
    slow = _part(both, document, folder / "slow", is_slow.__getitem__)
    fixed = _part(both, document, folder / "fixed", lambda number: not is_slow[number])
    return [slow], [fixed]


def _window_by_window(twin: Twin, folder: Path) -> tuple[list[Capture], list[Capture]]:
    session = _session(twin, folder, active=twin.steps, repeat=2 * WINDOWS)
    with session:
        for number in range(2 * WINDOWS * (1 + twin.steps)):
            (twin.fixed if number // (1 + twin.steps) % 2 else twin.slow)()
            session.step()
    return session.captures[::2], session.captures[1::2]


def _session(twin: Twin, folder: Path, **schedule: int) -> Session:
    given: dict[str, Any] = {"warmup": 1, **schedule, "export": "inline", **twin.options}
    return Session(output_dir=folder, **given)


def _median_ns(captures: list[Capture]) -> float:
    return statistics.median(
        ns for capture in captures for ns in capture.steps.column("duration_ns")[1:]
    )


def _part(
    capture: Capture, document: dict[str, Any], folder: Path, wanted: Callable[[int], bool]
) -> Capture:
    """The capture that a recording of the wanted steps alone would have given.

    `document` is the content of the capture's trace. `wanted` tells from a step's number whether the step is wanted. No
    time passes between the start of an unwanted step and the start of the next one: the events inside are left out, and
    everything later is earlier by that time.
    """
    steps = [(row.start_ns, wanted(row.number)) for row in capture.steps]
    last = capture.steps[-1]
    kept = _Kept([*steps, (last.start_ns + last.duration_ns, True)])
    moved = (kept.event(event) for event in document["traceEvents"])
    part = {**document, "traceEvents": [event for event in moved if event is not None]}
    return _written(capture, part, folder)


def _document(capture: Capture) -> dict[str, Any]:
    """The content of a capture's trace."""
    assert capture.trace_path is not None
    document: dict[str, Any] = msgspec.json.decode(gzip.decompress(capture.trace_path.read_bytes()))
    return document


def _written(capture: Capture, document: dict[str, Any], folder: Path) -> Capture:
    """A capture like another one, of a part of its window."""
    folder.mkdir(parents=True)
    metadata = {**capture.metadata, "environment": _settings(capture.metadata["environment"])}
    (folder / "capture.json").write_text(json.dumps(metadata))
    trace = gzip.compress(msgspec.json.encode(document), compresslevel=1)
    (folder / "trace.json.gz").write_bytes(trace)
    return Capture.load(folder)


def _settings(environment: dict[str, Any]) -> dict[str, Any]:
    """What holds for any part of a window: not what was counted in the whole of it."""
    return {**environment, "garbage_collection": None, "dynamo": None}


class _Kept:
    """A clock that stands still in the spans that are not kept."""

    def __init__(self, spans: list[tuple[int, bool]]) -> None:
        """Each span has its start and whether it is kept, and ends where the next one starts."""
        self._starts = [start for start, _ in spans]
        self._kept = [kept for _, kept in spans]
        self._before = [0]
        for (start, kept), (end, _) in pairwise(spans):
            self._before.append(self._before[-1] + (end - start if kept else 0))

    def time(self, ns: int) -> int:
        at = bisect_right(self._starts, ns) - 1
        if at < 0:
            return ns
        since = ns - self._starts[at] if self._kept[at] else 0
        return self._starts[0] + self._before[at] + since

    def event(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The event on this clock; None if it lies in a span that is not kept."""
        if "ts" not in event or event["ph"] == "M":
            return event
        start = round(event["ts"] * 1000)
        end = start + round(event.get("dur", 0) * 1000)
        at = bisect_right(self._starts, start) - 1
        moved, until = self.time(start), self.time(end)
        if at >= 0 and not self._kept[at] and moved == until:
            return None
        changed = {**event, "ts": moved / 1000}
        return {**changed, "dur": (until - moved) / 1000} if "dur" in event else changed
