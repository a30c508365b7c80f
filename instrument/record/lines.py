"""`LineSampler` notes 100 times a second which lines the threads run, over the whole run.

torch releases the GIL in its operators, and CPython checks for waiting threads at calls, so the
noted line is the one that calls: a line of `sys._current_frames()` is right even for a step that
spends its time in torch. The thread that trains does nothing for it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from json import dumps
from pathlib import Path
from random import Random
from threading import Event, Thread, get_ident
from threading import enumerate as all_threads
from types import CodeType, FrameType
from typing import NamedTuple

from instrument.base import threads
from instrument.base.files import LINES_FORMAT, encodable, write
from instrument.base.log import logger

# On the average; each wait is between half and one and a half of it, so that no loop hides between
# two samples.
INTERVAL_S = 0.01
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
_BUSY_TICKS, _LOOK_EVERY = 5, 100
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# In this package, these files call the user's code, or are called by it at every step.
_AROUND_USERS = ("calls.py", "script.py", "session.py", "unedited.py")
_LIBRARIES = tuple(
    sorted({f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("stdlib", "purelib", "platlib")})
)

# The codes and instructions of the frames, the innermost first.
Stack = tuple[int, ...]


class Moment(NamedTuple):
    """Where the run is: its phase, the step of this phase, and whether a window records it."""

    phase: str
    step: int
    recording: bool


class LineSampler:
    """Samples the stacks of a run's threads, and writes them into one file of the run.

    `now` tells the moment of the run, or None before the first step has ended; `run` is the id of
    the run. The file is rewritten by `write`, on the sampler's own thread, and at the end. Cost:
    about 30 µs with the GIL for each sample, which is 0.3 % of the time.
    """

    def __init__(
        self,
        path: Path,
        now: Callable[[], Moment | None],
        run: str = "",
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._path, self._now, self._run_id = path, now, run
        self._thread = get_ident()  # the one that starts the session takes the steps
        self._codes: dict[int, CodeType] = {}  # keeps them alive, so that their ids stay theirs
        self._numbers: dict[Stack, int] = {}
        # samples by part of the run, phase, thread and stack
        self._counts: dict[tuple[int, str, str, int], int] = {}
        self._part_ns = 1_000_000_000
        self._parts: list[dict[str, int]] = []  # the first step of each phase, by part
        self._times: list[tuple[int, int]] = []
        self._clock_ns = clock_ns
        self._began_ns = clock_ns()
        self._looks = 0
        self._busy: dict[int, str] = {}  # the names of the other threads that are sampled
        self._ticks: dict[Thread, int] = {}
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

    def _run(self) -> None:
        jitter = Random()  # not the user's generator
        try:
            while not self._ended:
                if not self._wake.wait(INTERVAL_S * (0.5 + jitter.random())):
                    self.sample()
                    continue
                self._wake.clear()
                if self._dirty:
                    self._save()
            self._save()
        except Exception as error:  # must not reach the user's threading.excepthook
            logger.warning("The lines of the run are not sampled any longer: {!r}.", error)

    def sample(self) -> None:
        """Note where the threads are now."""
        moment = self._now()
        if moment is None:
            return
        self._looks += 1
        if self._looks % _LOOK_EVERY == 0:
            self.find_busy()
        part = self._part(moment)
        for thread, frame in sys._current_frames().items():
            # with the thread of the steps, also when it waits
            name = "" if thread == self._thread else self._busy.get(thread)
            if name is None:
                continue
            number = self._number(frame)
            key = part, moment.phase, name, number
            if key in self._counts or len(self._counts) < _MOST_COUNTS:
                self._counts[key] = self._counts.get(key, 0) + 1
            if moment.recording and not name and len(self._times) < _MOST_TIMES:
                self._times.append((time.time_ns(), number))

    def find_busy(self) -> None:
        """Find the other threads of the program that use the CPU; a thread that waits is none."""
        ticks = {each: _cpu_ticks(each) for each in all_threads()}
        self._busy = {
            each.ident or 0: each.name
            for each, now in ticks.items()
            if now - self._ticks.get(each, now) >= _BUSY_TICKS
            and not each.name.startswith("instrument-")
        }
        self._ticks = ticks

    def _part(self, moment: Moment) -> int:
        """The part of the run to which a sample belongs."""
        elapsed = self._clock_ns() - self._began_ns
        while elapsed >= _MOST_PARTS * self._part_ns:
            self._part_ns *= 2
            merged: dict[tuple[int, str, str, int], int] = {}
            for (part, *key), count in self._counts.items():
                wider = (part // 2, *key)
                merged[wider] = merged.get(wider, 0) + count  # type: ignore[index, arg-type]
            self._counts = merged
            halves = self._parts
            self._parts = [
                {**later, **earlier} for earlier, later in zip(halves[::2], [*halves[1::2], {}])
            ]
        part = elapsed // self._part_ns
        while len(self._parts) <= part:
            self._parts.append({})
        self._parts[part].setdefault(moment.phase, moment.step)
        return part

    def _number(self, frame: FrameType | None) -> int:
        """The number of the stack of a frame."""
        codes, stack = list[CodeType](), list[int]()
        while frame is not None and len(codes) < _MOST_FRAMES:
            codes.append(frame.f_code)
            stack += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        key = tuple(stack)  # of ids, because the hash of a code is that of all its instructions
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
        # a stack without frames lies in our own code, or was seen when there were too many stacks
        counts = [[*key, count] for key, count in self._counts.items() if stacks[key[3]]]
        content = {
            "format": LINES_FORMAT,
            "run": self._run_id,  # because another run into the same folder replaces the file
            "interval_ns": round(INTERVAL_S * 1e9),
            "part_ns": self._part_ns,
            "first_steps": self._parts,
            "frames": list(frames),
            "stacks": stacks,
            "counts": counts,
            "times": self._times,
        }
        with suppress(OSError):  # a full disk: the captures say so, and the next file may fit
            write(self._path, dumps(encodable(content), separators=(",", ":")))

    def _frames(self, stack: Stack) -> list[tuple[str, str, int, str]]:
        """The kind, file, line and function of each frame of a stack, without our own frames.

        There are none if the stack is one of recording, whose time is not the program's.
        """
        frames = []
        for code_id, instruction in zip(stack[::2], stack[1::2]):
            code = self._codes[code_id]
            kind, file = _file(code.co_filename)
            if kind == "recording":
                return []
            if kind != "own":
                frames.append((kind, file, _line(code, instruction), code.co_qualname))
        return frames


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
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:  # it has ended, or this is not Linux
        return 0
    return sum(map(int, stat.rpartition(")")[2].split()[11:13]))
