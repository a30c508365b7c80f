"""A slow simulator of small programs on a CPU and a device, written without the code under test.

A program is a tree of what threads do. `run` plays the program event by event and returns the trace
that a profiler would write, and the duration of each step. An edit (`scaled`, `removed`, …) changes
the program itself. So the edited program runs for real, and a prediction from the trace of the first
run can be compared with it.

All times are in nanoseconds. The rules of this machine:

- Work on a stream starts `DELAY` after its call has begun, `GAP` after the work before it has ended,
  and `CROSS` after the work of another stream that it waits for.
- A waiting call returns `LAG` after the work has ended, or after its own time.
- A call that finds a full queue returns `QUEUE_LAG` after the oldest work has started.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import accumulate

from builders import (
    ENGINE,
    PAGEABLE,
    PINNED,
    WORKERS,
    Event,
    annotation,
    call,
    made,
    node,
    span,
    synchronisation,
)
from builders import copy as copy_event
from builders import kernel as kernel_event

DELAY, GAP, CROSS, LAG, QUEUE_LAG = 7_000, 1_000, 2_000, 3_200, 600
MAIN = 1


@dataclass(frozen=True)
class Work:
    """CPU time."""

    ns: int


@dataclass(frozen=True)
class Op:
    """An operator. One with a `number` makes a backward node, or is that node on the engine's thread."""

    name: str
    body: tuple[Node, ...]
    number: int = 0


@dataclass(frozen=True)
class Range:
    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Launch:
    """A call of `own` ns that starts a kernel of `ns`, or a copy."""

    name: str
    ns: int
    stream: int = 7
    own: int = 4_000
    call: str = "cudaLaunchKernel"


@dataclass(frozen=True)
class Sync:
    """A call that waits for a stream, or with None for the device."""

    stream: int | None = None
    own: int = 16_000


@dataclass(frozen=True)
class StreamWait:
    """The next work on `stream` waits for what has been launched on `other`."""

    stream: int
    other: int
    own: int = 2_000


@dataclass(frozen=True)
class Hand:
    """Another thread runs this, while this one waits."""

    thread: int
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Batch:
    """A call that waits until a batch of a loader's only worker is ready.

    The worker begins it when it has loaded the batch before, and the program has taken the one before that.
    """

    loads: int
    own: int = 20_000


Node = Work | Op | Range | Launch | Sync | StreamWait | Hand | Batch


@dataclass(frozen=True)
class Program:
    """What each thread does from its start on; a queue of a stream holds `queue` launches."""

    threads: dict[int, tuple[Node, ...]]
    queue: int = 1021

    def __iter__(self) -> Iterator[Node]:
        for body in self.threads.values():
            yield from _all(body)


def step(number: int, *body: Node) -> Range:
    return Range(f"ProfilerStep#{number}", body)


def copy(ns: int, *, stream: int = 7, blocks: bool = False, own: int = LAG) -> Launch:
    return Launch(PAGEABLE if blocks else PINNED, ns, stream, own, "cudaMemcpyAsync")


# ---- the machine


@dataclass
class _Work:
    thread: int
    launched: int
    start: int
    end: int


@dataclass
class _Machine:
    queue: int
    now: int = 0
    events: list[Event] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    asked: list[tuple[int, int]] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    streams: dict[int, list[_Work]] = field(default_factory=dict)
    awaited: dict[int, list[_Work]] = field(default_factory=dict)
    heap: list[tuple[int, int, Iterator[int | None]]] = field(default_factory=list)
    callers: dict[int, Iterator[int | None]] = field(default_factory=dict)
    count: int = 0

    def push(self, time: int, thread: Iterator[int | None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (time, self.count, thread))

    def run(self) -> None:
        """Go from one point in time to the next one, and let the thread go on whose turn it is."""
        while self.heap:
            self.now, _, self.current = heapq.heappop(self.heap)
            try:
                until = next(self.current)
            except StopIteration:
                caller = self.callers.pop(id(self.current), None)
                if caller is not None:
                    self.push(self.now, caller)
                continue
            if until is not None:
                self.push(until, self.current)

    def play(self, tid: int, body: tuple[Node, ...]) -> Iterator[int | None]:
        for each in body:
            start = self.now
            match each:
                case Work(ns):
                    yield start + ns
                case Range(name, inner):
                    yield from self.play(tid, inner)
                    self.emit(annotation, name, start, tid=tid)
                    if name.startswith("ProfilerStep#"):
                        self.steps.append((start, self.now))
                case Op(name, inner, number):
                    yield from self.play(tid, inner)
                    self.emit_operator(name, start, number, tid)
                case Hand(thread, inner):
                    other = self.play(thread, inner)
                    self.callers[id(other)] = self.current
                    self.push(start, other)
                    yield None
                case Batch(loads, own):
                    begun = max([*self.ready[-1:], *self.taken[:-1][-1:]], default=start)
                    self.asked.append((start, begun))
                    until = max(start + own, begun + loads)
                    yield until
                    # The first batch was ordered before the program began.
                    self.ready.append(begun + loads if self.taken else until)
                    self.taken.append(until)
                    self.emit(annotation, WORKERS, start, tid=tid)
                case Launch():
                    yield from self.launch(each, tid)
                case Sync(stream, own):
                    streams = self.streams if stream is None else [stream]
                    last = [self.streams[k][-1].end + LAG for k in streams if self.streams.get(k)]
                    yield max([start + own, *last])
                    self.emit_sync(stream, start, tid)
                case StreamWait():
                    yield from self.wait(each, tid)

    def launch(self, each: Launch, tid: int) -> Iterator[int | None]:
        start, before = self.now, self.streams.setdefault(each.stream, [])
        starts = [start + DELAY, *(w.end + GAP for w in before[-1:])]
        starts += [work.end + CROSS for work in self.awaited.pop(each.stream, [])]
        work = _Work(tid, start, max(starts), max(starts) + each.ns)
        returns = start + each.own
        if len(before) >= self.queue:
            oldest = before[-self.queue].start
            returns = max(returns, oldest + QUEUE_LAG)
        if each.name == PAGEABLE:
            returns = max(returns, work.end + LAG)
        before.append(work)
        correlation = self.correlation()
        yield returns
        self.emit(call, each.call, start, tid=tid, correlation=correlation)
        times = {"start_us": work.start / 1000, "duration_us": each.ns / 1000, "tid": each.stream}
        if each.call == "cudaMemcpyAsync":
            copied = copy_event(**times, correlation=correlation)
            self.events.append({**copied, "name": each.name})
        else:
            self.events.append(kernel_event(each.name, **times, correlation=correlation))

    def wait(self, each: StreamWait, tid: int) -> Iterator[int | None]:
        start, recorded = self.now, self.correlation()
        self.awaited.setdefault(each.stream, []).extend(self.streams.get(each.other, [])[-1:])
        yield start + each.own
        self.emit(call, "cudaEventRecord", start, tid=tid, correlation=recorded)
        start, waits = self.now, self.correlation()
        yield start + each.own
        self.emit(call, "cudaStreamWaitEvent", start, tid=tid, correlation=waits)
        stated = {
            "correlation": waits,
            "wait_on_stream": each.other,
            "wait_on_cuda_event_id": 1,
            "wait_on_cuda_event_record_corr_id": recorded,
        }
        self.events.append(
            synchronisation("Stream Wait Event", start / 1000, 1, tid=each.stream, **stated)
        )

    def correlation(self) -> int:
        self.count += 1
        return self.count

    def emit(self, build: Callable[..., Event], name: str, start: int, **more: int) -> None:
        self.events.append(build(name, start / 1000, (self.now - start) / 1000, **more))

    def emit_operator(self, name: str, start: int, number: int, tid: int) -> None:
        times = (start / 1000, (self.now - start) / 1000)
        if not number:
            self.events.append(span(name, *times, tid=tid))
        elif name.startswith(ENGINE):
            self.events.append(node(name.removeprefix(ENGINE), *times, number, tid=tid))
        else:
            self.events.append(made(name, *times, number, tid=tid))

    def emit_sync(self, stream: int | None, start: int, tid: int) -> None:
        name = "cudaDeviceSynchronize" if stream is None else "cudaStreamSynchronize"
        correlation = self.correlation()
        self.emit(call, name, start, tid=tid, correlation=correlation)
        kind, row = ("Context Sync", -1) if stream is None else ("Stream Sync", stream)
        self.events.append(synchronisation(kind, start / 1000, 1, tid=row, correlation=correlation))


@dataclass(frozen=True)
class Run:
    """What a run has left.

    Attributes:
        events: the events of the trace.
        steps: the duration of each step, from its start or the end of the step before it until CPU
            and device have done what the step does.
        step_of: for each launch of each thread, the step in which it was called; -1 for none.
        asked: when the main thread asked for each batch, and when the worker began it.
    """

    events: list[Event]
    steps: list[int]
    step_of: dict[tuple[int, int], int]
    asked: list[tuple[int, int]]


def run(program: Program, recorded: Run | None = None) -> Run:
    """Play a program.

    If threads that start on their own launch work, it counts for the steps of the run `recorded`.
    """
    machine = _Machine(program.queue)
    for tid, body in program.threads.items():
        machine.push(0, machine.play(tid, body))
    machine.run()
    works = [work for stream in machine.streams.values() for work in stream]
    works.sort(key=lambda work: work.launched)
    seen: Counter[int] = Counter()
    ends, step_of = [end for _, end in machine.steps], {}
    for work in works:
        nth = (work.thread, seen[work.thread])
        seen[work.thread] += 1
        inside = [k for k, (start, end) in enumerate(machine.steps) if start <= work.launched < end]
        step_of[nth] = inside[0] if inside else -1
        if recorded is not None and work.thread in program.threads and work.thread != MAIN:
            step_of[nth] = recorded.step_of[nth]
        if step_of[nth] >= 0:
            ends[step_of[nth]] = max(ends[step_of[nth]], work.end)
    until = list(accumulate(ends, max))
    begins = [max(start, end) for (start, _), end in zip(machine.steps, [0, *until])]
    return Run(machine.events, [b - a for a, b in zip(begins, until)], step_of, machine.asked)


# ---- the edits


def scaled(program: Program, kind: str, name: str, by: float) -> Program:
    """Let a range, operator, kernel or runtime call take `by` times as long."""

    def change(each: Node) -> Node:
        match each:
            case Work(ns):
                return Work(_times(ns, by))
            case Launch(ns=ns, own=own):
                return replace(each, ns=_times(ns, by), own=_times(own, by))
            case Sync(own=own) | StreamWait(own=own) | Batch(own=own):
                return replace(each, own=_times(own, by))
        return each

    def of_kernel(each: Node) -> Node:
        fits = isinstance(each, Launch) and fnmatchcase(each.name, name)
        return replace(each, ns=_times(each.ns, by)) if fits else each

    def of_call(each: Node) -> Node:
        fits = isinstance(each, Launch) and fnmatchcase(each.call, name)
        return replace(each, own=_times(each.own, by)) if fits else each

    if kind in ("kernel", "call"):
        return _changed(program, {"kernel": of_kernel, "call": of_call}[kind], lambda _: True)
    return _changed(program, change, _chooser(program, kind, name))


def removed(program: Program, kind: str, name: str) -> Program:
    """Let a range, an operator, kernels or all synchronising calls be gone, with their launches."""

    def gone(each: Node) -> Node | None:
        return None if isinstance(each, (Work, Launch, Sync, StreamWait, Batch)) else each

    if kind == "kernel":
        return _changed(
            program,
            lambda each: (
                None if isinstance(each, Launch) and fnmatchcase(each.name, name) else each
            ),
            lambda _: True,
        )
    if kind == "sync":
        return _changed(
            program, lambda each: None if isinstance(each, Sync) else each, lambda _: True
        )
    return _changed(program, gone, _chooser(program, kind, name))


def without_waits(program: Program) -> Program:
    """Let synchronising calls return at once; their own time stays."""
    return _changed(
        program, lambda each: Work(each.own) if isinstance(each, Sync) else each, lambda _: True
    )


def without_copies(program: Program) -> Program:
    """Let copies take nothing of a stream, and their calls not wait."""

    def change(each: Node) -> Node:
        is_copy = isinstance(each, Launch) and each.call == "cudaMemcpyAsync"
        return Work(each.own) if is_copy else each

    return _changed(program, change, lambda _: True)


def loading(program: Program, nth: int, ns: int) -> Program:
    """Let the worker process need a time for one of the batches."""
    count = -1

    def change(each: Node) -> Node:
        nonlocal count
        count += isinstance(each, Batch)
        return Batch(ns, each.own) if isinstance(each, Batch) and count == nth else each

    return _changed(program, change, lambda _: True)


def _times(ns: int, by: float) -> int:
    found = ns * by
    assert found == int(found), f"{ns} × {by} is no whole number of nanoseconds"
    return int(found)


def _all(body: tuple[Node, ...]) -> Iterator[Node]:
    for each in body:
        yield each
        yield from _all(getattr(each, "body", ()))


def _chooser(program: Program, kind: str, name: str) -> Callable[[Node], bool]:
    """Whether all inside a node is edited: ranges take their backward nodes along."""
    if kind == "operator":
        return lambda each: isinstance(each, Op) and fnmatchcase(each.name, name)
    numbers = {
        inner.number
        for each in program
        if isinstance(each, Range) and fnmatchcase(each.name, name)
        for inner in _all(each.body)
        if isinstance(inner, Op) and inner.number
    }

    def chosen(each: Node) -> bool:
        label = WORKERS if isinstance(each, Batch) else getattr(each, "name", "")
        is_range = isinstance(each, (Range, Batch)) and fnmatchcase(label, name)
        return is_range or (isinstance(each, Op) and each.number in numbers)

    return chosen


def _changed(
    program: Program, change: Callable[[Node], Node | None], chooses: Callable[[Node], bool]
) -> Program:
    """The program with each node changed that is, or lies in, a chosen node of the same thread."""

    def body_of(body: tuple[Node, ...], inside: bool) -> tuple[Node, ...]:
        found = []
        for each in body:
            here = inside or chooses(each)
            after = change(each) if here else each
            if after is None:
                continue
            if isinstance(after, Hand):
                after = replace(after, body=body_of(after.body, False))
            elif isinstance(after, (Op, Range)):
                after = replace(after, body=body_of(after.body, here))
            found.append(after)
        return tuple(found)

    return replace(
        program, threads={tid: body_of(body, False) for tid, body in program.threads.items()}
    )
