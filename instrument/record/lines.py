"""`LineSampler` notes 100 times a second which lines the threads run, over the whole run.

torch releases the GIL in its operators, and CPython checks for waiting threads at calls, so the
noted line is the one that calls: a line of `sys._current_frames()` is right even for a step that
spends its time in torch. The thread that trains does nothing for it.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from json import dumps
from pathlib import Path
from platform import machine
from random import Random
from threading import Event, Thread, get_ident, get_native_id
from threading import enumerate as all_threads
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias

from instrument.base import threads
from instrument.base.files import LINES_FORMAT, encodable, write
from instrument.base.log import logger
from instrument.record.line_trace import NotedLine, trace_lines

# On the average; each wait is between half and one and a half of it, so that no loop hides between
# two samples.
INTERVAL_S = 0.01
# In a detail window, of which no time counts, so many times as often.
_DENSER = 10
# A stack has at most this many frames, without the outer ones; a run has at most this many stacks
# and counts of them (a program may start threads, or enter phases, of ever new names), and samples
# of further ones are left out.
_MOST_FRAMES, _MOST_STACKS, _MOST_COUNTS = 100, 5000, 100_000
# The run is divided into at most this many parts of equal length, to show what grows.
_MOST_PARTS = 16
# The samples of windows whose times are kept, to find the operators that ran.
_MOST_TIMES = 20_000
# Another thread is busy if it used so many ticks (10 ms) of a CPU since the last look for such
# threads, after so many samples.
_BUSY_TICKS, _LOOK_EVERY, _TICK_NS, _MOST_NAMES = 5, 100, 10_000_000, 100
# A thread that used the CPU for this part of the time since the last sample is not asked whether it
# waits, because to ask costs a switch of the GIL.
_MOSTLY_RUNS = 0.9
# What a thread waits for, by the number of its system call on x86_64 and on aarch64.
_CALLS = {
    "sleep": ({35, 230}, {101, 115}),
    "read": ({0, 17, 19, 257, -1}, {63, 67, 65, 56, -1}),  # -1: a page of a file in memory
    "write": ({1, 18, 20, 74, 75}, {64, 68, 66, 82, 83}),
    "network": ({42, 44, 45, 46, 47}, {203, 206, 207, 211, 212}),
    "process": ({61, 247}, {260, 95}),
    "poll": ({7, 23, 232, 270, 271, 281}, {22, 72, 73}),
    "thread": ({202}, {98}),
}
_ARCHITECTURE = {"x86_64": 0, "aarch64": 1}.get(machine())
_WAITS = (
    {}
    if _ARCHITECTURE is None
    else {number: name for name, both in _CALLS.items() for number in both[_ARCHITECTURE]}
)
# With this operation, the threads of an operator wait for each other.
_FUTEX_WAIT = 0
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# In this package, these files call the user's code, or are called by it at every step.
_AROUND_USERS = ("calls.py", "script.py", "session.py", "unedited.py", "worker_lines.py")
_LIBRARIES = tuple(
    sorted({f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("stdlib", "purelib", "platlib")})
)
# A file that torch's Inductor has generated, in whatever folder its cache is.
_GENERATED = re.compile(r"[/\\](..)[/\\]c\1[a-z2-7]{49}\.py$")

# The codes of the frames, the innermost first, and after them the instruction of each.
Stack = tuple[int, ...]
# Samples by part of the run, phase, a name, and the number of the stack.
Counts: TypeAlias = dict[tuple[int, str, str, int], int]


class Moment(NamedTuple):
    """Where the run is: its phase, the step of this phase, and whether a window records it.

    `detail` says whether a detail window does; see `instrument.record.detail`.
    """

    phase: str
    step: int
    recording: bool
    detail: bool = False


class LineSampler:
    """Samples the stacks of a run's threads, and writes them into one file of the run.

    `now` tells the moment of the run, or None before the first step has ended; `run` is the id of
    the run; `workers` reads what the workers of loaders have sampled. The file is rewritten by
    `write`, on the sampler's own thread, and at the end. Cost: about 30 µs with the GIL for each
    sample, which is 0.3 % of the time.
    """

    def __init__(
        self,
        path: Path,
        now: Callable[[], Moment | None],
        run: str = "",
        clock_ns: Callable[[], int] = time.monotonic_ns,
        workers: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        self._path, self._now, self._run_id, self._workers = path, now, run, workers
        self._thread = get_ident()  # the one that starts the session takes the steps
        self._codes: dict[int, CodeType] = {}  # keeps them alive, so that their ids stay theirs
        self._numbers: dict[Stack, int] = {}
        self._counts: Counts = {}  # the samples by thread
        self._part_ns = 1_000_000_000
        self._parts: list[dict[str, int]] = []  # the first step of each phase, by part
        self._times: list[tuple[int, int]] = []
        self._traced: list[NotedLine] = []
        self._is_dense = False
        self._clock_ns = clock_ns
        self._began_ns = clock_ns()
        self._looks = 0
        self._busy: dict[int, str] = {}  # the names of the other threads that are sampled
        self._ticks: dict[Thread, int] = {}
        self._used: dict[str, int] = {}  # the ticks that other threads used, by name
        # of the samples of the thread of the steps, those in which it waited, by what it waits for
        self._waits: Counts = {}
        self._step: tuple[str, int] | None = None
        self._has_steps = False  # a worker of a loader has none
        # of both, those since this step began: after the last step, the run is no step's
        self._since: tuple[Counts, Counts] = ({}, {})
        self._marks: list[tuple[int, ...]] = []  # at the start of each part
        self._cpu_clock = None
        with suppress(AttributeError, OSError):  # not on this system
            self._cpu_clock = time.pthread_getcpuclockid(self._thread)
        self._task = f"self/task/{get_native_id()}"  # in /proc, of the thread of the steps
        self._call_file: int | None = None
        self._last = clock_ns(), self._cpu_ns()  # at the last sample
        self._wake, self._ended, self._dirty = Event(), False, False
        self._sampler: Thread | None = None

    def start(self) -> LineSampler:
        """Begin to sample; the thread that calls this is the one that takes the steps."""
        if sys.version_info < (3, 11, 5):  # `sys._current_frames` may hang (CPython's issue 106883)
            logger.warning("profiler.lines does nothing here: it needs Python 3.11.5 or newer.")
            return self
        thread = Thread(target=self._run, name="instrument-lines", daemon=True)
        if threads.start(thread, "the lines of the run are not sampled"):
            self._sampler = thread
        return self

    def trace(self) -> Callable[[], dict[str, Any]]:
        """Note every line of this thread in a detail window, until the result is called.

        Where this cannot be done, samples are taken more often instead.
        """
        end = trace_lines(self._traced, lambda file: _file(file)[0] == "user")
        self._is_dense = end is None

        def ended() -> dict[str, Any]:
            if end is not None:
                end()
            self._is_dense = False
            self.write()
            return {}

        return ended

    def write(self) -> None:
        """Have the file rewritten soon; any thread may call this."""
        self._dirty = True
        self._wake.set()

    def stop(self) -> None:
        """Take no further sample, and write the file."""
        self._ended = True
        self._wake.set()
        if self._sampler is not None:
            self._sampler.join(timeout=10)
        if self._call_file is not None:
            os.close(self._call_file)
            self._call_file = None

    def _run(self) -> None:
        jitter = Random()  # not the user's generator
        try:
            self.find_busy()
            while not self._ended:
                mean_s = INTERVAL_S / _DENSER if self._is_dense else INTERVAL_S
                if not self._wake.wait(mean_s * (0.5 + jitter.random())):
                    self.sample()
                    continue
                self._wake.clear()
                if self._dirty:
                    self._save()
            self._leave_out_the_end()
            self._save()
        except Exception as error:  # must not reach the user's threading.excepthook
            logger.warning("The lines of the run are not sampled any longer: {!r}.", error)

    def sample(self) -> None:
        """Note where the threads are now."""
        moment = self._now()
        if moment is None:
            return
        if moment.detail:  # no time of it counts
            if self._is_dense and len(self._times) < _MOST_TIMES:
                now_ns, stacks = self._stacks({self._thread: ""})
                self._times += [(now_ns, number) for _, number in stacks]
            return
        self._looks += 1
        if self._looks % _LOOK_EVERY == 0:
            self.find_busy()
        part = self._part(moment)
        if (step := (moment.phase, moment.step)) != self._step:
            self._has_steps = self._step is not None
            self._step, self._since = step, ({}, {})
        # with the thread of the steps, also when it waits
        now_ns, stacks = self._stacks({**self._busy, self._thread: ""})
        for name, number in stacks:
            key = part, moment.phase, name, number
            if key in self._counts or len(self._counts) < _MOST_COUNTS:
                self._count(0, key)
            if not name and (cause := self._waits_for()):
                wait = part, moment.phase, cause, number
                self._count(1, wait)
            if moment.recording and not name and len(self._times) < _MOST_TIMES:
                self._times.append((now_ns, number))

    def _count(self, which: int, key: tuple[int, str, str, int]) -> None:
        for counts in ((self._counts, self._waits)[which], self._since[which]):
            counts[key] = counts.get(key, 0) + 1

    def _leave_out_the_end(self) -> None:
        """Take back the samples since the last step ended."""
        if not self._has_steps:
            return
        for counts, since in zip((self._counts, self._waits), self._since):
            for key, count in since.items():
                counts[key] -= count

    def _stacks(self, names: dict[int, str]) -> tuple[int, list[tuple[str, int]]]:
        """The time, and the name and the number of the stack of each of these threads.

        Nothing here gives the GIL to the threads, which would go on to other lines. In Python 3.11,
        a garbage collection could: it may begin where a frame is made, and then run any code, after
        which the frame that is made belongs to memory that is used for others.
        """
        collects = sys.version_info < (3, 12) and gc.isenabled()
        if collects:
            gc.disable()
        try:
            frames, now_ns = sys._current_frames(), time.time_ns()
            return now_ns, [
                (name, self._number(frame))
                for thread, name in names.items()
                if (frame := frames.pop(thread, None)) is not None
            ]
        finally:
            if collects:
                gc.enable()

    def find_busy(self) -> None:
        """Find the other threads of the program that use the CPU; a thread that waits is none."""
        ticks = {each: _cpu_ticks(each) for each in all_threads()}
        used = {each: now - self._ticks.get(each, now) for each, now in ticks.items()}
        others = [each for each in ticks if not each.name.startswith("instrument-")]
        others = [each for each in others if each.ident != self._thread and used[each]]
        self._busy = {each.ident or 0: each.name for each in others if used[each] >= _BUSY_TICKS}
        for each in others:
            if each.name in self._used or len(self._used) < _MOST_NAMES:
                self._used[each.name] = self._used.get(each.name, 0) + used[each]
        self._ticks = ticks

    def _waits_for(self) -> str | None:
        """What the thread of the steps waits for; None if it runs, or if the system hides it.

        A thread that waits for the GIL gets it when this one reads the file, so it runs.
        """
        (then_ns, then_cpu_ns), self._last = self._last, (self._clock_ns(), self._cpu_ns())
        if self._last[1] - then_cpu_ns >= _MOSTLY_RUNS * (self._last[0] - then_ns):
            return None
        try:
            if self._call_file is None:
                self._call_file = os.open(f"/proc/{self._task}/syscall", os.O_RDONLY)
            number, _, *arguments = os.pread(self._call_file, 200, 0).split()
        except (OSError, ValueError):  # not Linux, or "running"
            return None
        cause = _WAITS.get(int(number), "")
        is_operators = cause == "thread" and int(arguments[0], 16) & 0x7F == _FUTEX_WAIT
        return "operator" if is_operators else cause or "other"

    def _mark(self) -> tuple[int, ...]:
        """The time since the start of the sampler, and the state of the process then.

        They are the CPU time of the process, that of the thread of the steps, the time in which
        this was ready to run but had no CPU, and the memory in RAM; 0 where the system hides it.
        """
        elapsed_ns = self._clock_ns() - self._began_ns
        (_, queued_ns), pages = _proc(f"{self._task}/schedstat")[:2] or (0, 0), _proc("self/statm")
        memory_bytes = pages[1] * os.sysconf("SC_PAGE_SIZE") if pages else 0
        return elapsed_ns, time.process_time_ns(), self._cpu_ns(), queued_ns, memory_bytes

    def _cpu_ns(self) -> int:
        """The CPU time of the thread of the steps; 0 if it is unknown, or if the thread ended."""
        with suppress(OSError):
            return time.clock_gettime_ns(self._cpu_clock) if self._cpu_clock is not None else 0
        return 0

    def _part(self, moment: Moment) -> int:
        elapsed = self._clock_ns() - self._began_ns
        while elapsed >= _MOST_PARTS * self._part_ns:
            self._part_ns *= 2
            self._counts, self._waits = _wider(self._counts), _wider(self._waits)
            self._since = _wider(self._since[0]), _wider(self._since[1])
            self._marks = self._marks[::2]
            halves = self._parts
            self._parts = [
                {**later, **earlier} for earlier, later in zip(halves[::2], [*halves[1::2], {}])
            ]
        part = elapsed // self._part_ns
        while len(self._parts) <= part:
            self._parts.append({})
            self._marks.append(self._mark())
        self._parts[part].setdefault(moment.phase, moment.step)
        return part

    def _number(self, frame: FrameType | None) -> int:
        codes, instructions = list[CodeType](), list[int]()
        while frame is not None and len(codes) < _MOST_FRAMES:
            codes.append(frame.f_code)
            instructions.append(frame.f_lasti)
            frame = frame.f_back
        # of ids, because the hash of a code is that of all its instructions
        key = (*map(id, codes), *instructions)
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _MOST_STACKS:
                key = ()
            else:
                self._codes.update((id(code), code) for code in codes)
            number = self._numbers.setdefault(key, len(self._numbers))
        return number

    def _save(self) -> None:
        """Write the file; the counts stay."""
        self._dirty = False
        frames: dict[tuple[str, str, int, str], int] = {}
        stacks = [
            [frames.setdefault(frame, len(frames)) for frame in self._frames(stack)]
            for stack in self._numbers
        ]
        noted = self._traced.copy()  # which its thread may still extend
        traced = [
            -1 if code is None else frames.setdefault(_frame(code, line), len(frames))
            for _, code, line in noted
        ]
        begins_ns = [at_ns for at_ns, *_ in noted]
        # a stack without frames lies in our own code, or was seen when there were too many stacks
        counts, waits = (
            [[*key, count] for key, count in each.items() if count and stacks[key[3]]]
            for each in (self._counts, self._waits)
        )
        content = {
            "format": LINES_FORMAT,
            "run": self._run_id,  # because another run into the same folder replaces the file
            "interval_ns": round(INTERVAL_S * 1e9),
            "part_ns": self._part_ns,
            "first_steps": self._parts,
            "stacks": stacks,
            "counts": counts,
            "waits": waits,
            "marks": [*self._marks, self._mark()] if self._marks else [],
            "used_ns": {name: ticks * _TICK_NS for name, ticks in self._used.items()},
            "workers": self._workers(),
        }
        numbers = {"times": self._times, "traced": [begins_ns, traced]}
        content = encodable({**content, "frames": list(frames)}) | numbers
        with suppress(OSError):  # a full disk: the captures say so, and the next file may fit
            write(self._path, dumps(content, separators=(",", ":")))

    def _frames(self, stack: Stack) -> list[tuple[str, str, int, str]]:
        """The kind, file, line and function of each frame of a stack, without our own frames.

        There are none if the stack is one of recording, whose time is not the program's.
        """
        frames = []
        for code_id, instruction in zip(stack, stack[len(stack) // 2 :]):
            code = self._codes[code_id]
            kind, _ = _file(code.co_filename)
            if kind == "recording":
                return []
            if kind != "own":
                frames.append(_frame(code, _line(code, instruction)))
        return frames


def _wider(counts: Counts) -> Counts:
    """The counts by parts that are twice as long."""
    merged: Counts = {}
    for (part, phase, name, stack), count in counts.items():
        wider = part // 2, phase, name, stack
        merged[wider] = merged.get(wider, 0) + count
    return merged


def _frame(code: CodeType, line: int) -> tuple[str, str, int, str]:
    return (*_file(code.co_filename), line, code.co_qualname)


@cache
def _line(code: CodeType, instruction: int) -> int:
    for begin, end, line in code.co_lines():
        if begin <= instruction < end:
            return line or code.co_firstlineno
    return code.co_firstlineno


@cache
def _file(path: str) -> tuple[str, str]:
    """Whose file it is (user, library, own, recording), and its path below a folder of imports.

    The folders above are left out, because they may tell a name or a customer.
    """
    if path.startswith(_PACKAGE):
        room, _, file = path.removeprefix(_PACKAGE).partition(os.sep)
        is_recording = room in ("record", "export") and file not in _AROUND_USERS
        return "recording" if is_recording else "own", path
    is_library = path.startswith((*_LIBRARIES, "<frozen")) or "-packages" + os.sep in path
    is_library = is_library or _GENERATED.search(path) is not None
    places: list[object] = [*sys.path]  # which may hold anything
    with suppress(OSError):  # the current folder was removed
        places.append(Path.cwd())
    folders = [f"{str(each).rstrip(os.sep)}{os.sep}" for each in places if each]
    above = max((each for each in folders if path.startswith(each)), key=len, default="")
    shown = Path(path[len(above) :])
    if shown.is_absolute():
        shown = Path(*shown.parts[-2:])
    return "library" if is_library else "user", str(shown)


def _cpu_ticks(thread: Thread) -> int:
    """The time that a thread has run on a CPU, in ticks of 10 ms; 0 where the system hides it."""
    return sum(_proc(f"self/task/{thread.native_id}/stat")[10:12])


def _proc(path: str) -> list[int]:
    """The numbers of a file of Linux after a name and a state; none if there is no file."""
    try:
        numbers = Path("/proc", path).read_text().rpartition(") ")[2].split()
    except OSError:  # the thread has ended, or this is not Linux
        return []
    return [int(each) for each in numbers if each.lstrip("-").isdecimal()]
