"""What the program does beside a window: its own profilers, its signal handlers, its log sinks."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import functools
import linecache
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import warm
from collected import Log
from loguru import logger
from torch.profiler import ProfilerActivity, profile
from torch.profiler.profiler import _KinetoProfile

from instrument import Capture, Session
from instrument.annotate import backends
from instrument.base.signals import uninterrupted
from instrument.export import window
from instrument.export.sinks import Sink
from instrument.record import timings
from instrument.record.recorder import Recorder
from instrument.record.triggers import Step
from instrument.record.triggers.trigger import TriggerCallbacks

pytestmark = pytest.mark.usefixtures("inline_export")

CPU = [ProfilerActivity.CPU]


def multiplications(profiler: Any) -> int:
    return sum(event.name == "aten::mm" for event in profiler.events())


def work() -> None:
    torch.ones(2, 2) @ torch.ones(2, 2)


def steps_in(session: Session) -> list[tuple[list[int], list[int]]]:
    """For each capture, the steps that capture.json names, and the whole steps of the trace."""
    found = []
    for capture in session.captures:
        window = capture.metadata["window"]
        named = list(range(window["first_step"], window["first_step"] + window["steps"]))
        found.append((named, [row.number for row in capture.steps]))
    return found


def in_process(code: str, folder: Path) -> str:
    """What the code prints in a process of its own, where torch may crash; `folder` is for captures."""
    done = warm.run_code(code, str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


class OnThread:
    """A profiler of the program on a thread of its own, which does the work once while it is on."""

    def __init__(self) -> None:
        self.profile = profile(activities=CPU)
        self._on, self._release = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self.profile:
            work()
            self._on.set()
            self._release.wait()

    def start(self) -> None:
        self._thread.start()
        self._on.wait()

    def stop(self) -> None:
        self._release.set()
        self._thread.join()


@pytest.mark.parametrize("on", ["the same thread", "another thread"])
@pytest.mark.parametrize(("begins", "kept"), [(1, []), (2, []), (3, [([2], [2])])])
def test_others_start(tmp_path: Path, log: Log, begins: int, kept: list[Any], on: str) -> None:
    """Step 1 is the warm-up; the profiler is still on when the window of steps 2 to 4 should end."""
    same = on == "the same thread"
    own = profile(activities=CPU) if same else OnThread()
    options = {"wait": 1, "warmup": 1, "active": 3, "profile_all_threads": not same}
    with Session(**options, output_dir=str(tmp_path)) as session:
        for step in range(8):
            if step == begins:
                own.start()
            work()
            if step == 6:
                own.stop()
            session.step()
    assert multiplications(getattr(own, "profile", own)) == (7 - begins if same else 1)
    assert steps_in(session) == kept
    (sentence,) = log.at("WARNING")[:1]
    assert "the program started another profiler" in sentence
    assert ("ended early, after 1 of 3 steps" in sentence) == bool(kept)
    if kept:
        assert session.captures[0].metadata["window"]["truncated"]


def test_profiler_within_a_window_truncates_it(tmp_path: Path, log: Log) -> None:
    with Session(wait=0, active=4, repeat=2, output_dir=str(tmp_path)) as session:
        for step in range(8):
            if step == 1:
                with profile(activities=CPU) as own:
                    work()
            work()
            session.step()
    assert multiplications(own) == 1
    assert steps_in(session) == [([0], [0]), ([4, 5, 6, 7], [4, 5, 6, 7])]
    sentence = "ended early, after 1 of 4 steps (the program started another profiler)"
    assert sentence in log.at("WARNING")[0]


def test_no_window_beside_another_profiler(tmp_path: Path, log: Log) -> None:
    counts: list[int] = []
    own = profile(
        activities=CPU,
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: counts.append(multiplications(profiler)),
    )
    with own, Session(wait=1, warmup=1, active=1, repeat=3, output_dir=str(tmp_path)) as session:
        for _ in range(9):
            work()
            own.step()
            session.step()
    assert counts == [3]
    assert steps_in(session) == [([8], [8])]  # the profiler is on during the warm-ups of 2 and 5
    (sentence,) = log.at("ERROR")
    assert sentence.startswith("Recording failed and training goes on: torch's own profiler is")


def test_steps_of_an_idle_profiler(tmp_path: Path) -> None:
    schedule = torch.profiler.schedule(wait=5, warmup=1, active=2, repeat=1)
    names: list[str] = []
    own = profile(
        activities=CPU,
        schedule=schedule,
        on_trace_ready=lambda profiler: names.extend(event.name for event in profiler.events()),
    )
    with own, Session(wait=2, active=2, output_dir=str(tmp_path)) as session:
        for _ in range(9):
            work()
            own.step()
            session.step()
    assert steps_in(session) == [([2, 3], [2, 3])]
    assert sum(name.startswith("ProfilerStep") for name in names) == 2


def test_a_profiler_that_warms_up_before_the_first_session_records_all(tmp_path: Path) -> None:
    code = """
        import sys
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule
        from instrument import Session
        counts = []
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=3, active=2, repeat=1),
            on_trace_ready=lambda own: counts.append(
                sum(event.name == "aten::mm" for event in own.events())
            ),
        ) as own, Session(
            wait=0, active=1, repeat=6, output_dir=sys.argv[1], export="inline"
        ) as session:
            for _ in range(7):
                torch.ones(2, 2) @ torch.ones(2, 2)
                own.step()
                session.step()
        print(counts, [capture.name for capture in session.captures])
    """
    assert in_process(code, tmp_path) == "[2] ['steps_000005-000005_rank0']\n"


def test_profiler_on_another_thread_drops_the_window(tmp_path: Path) -> None:
    """Steps 2 and 3 are recorded, and torch would crash if it stopped both profilers."""
    if torch.__version__ < (2, 12):
        pytest.skip("this torch refuses the second profiler, as docs/compatibility.md says")
    code = """
        import sys
        import threading
        import torch
        from torch.profiler import ProfilerActivity, profile
        from instrument import Session

        def own(on, release):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                torch.ones(2, 2) @ torch.ones(2, 2)
                on.set()
                release.wait()
            print(sum(event.name == "aten::mm" for event in profiler.events()), end=" ")

        options = dict(wait=1, warmup=1, active=2, repeat=3, export="inline")
        for begins, ends in ((1, 1), (2, 5), (3, 3), (3, 5)):
            on, release = threading.Event(), threading.Event()
            thread = threading.Thread(target=own, args=(on, release))
            with Session(**options, output_dir=f"{sys.argv[1]}/{begins}-{ends}") as session:
                for step in range(13):
                    if step == begins:
                        thread.start()
                        on.wait()
                    torch.ones(2, 2) @ torch.ones(2, 2)
                    if step == ends:
                        release.set()
                        thread.join()
                    session.step()
            print([capture.metadata["window"]["first_step"] for capture in session.captures])
    """
    found = in_process(code, tmp_path).splitlines()
    assert found == ["1 [6, 10]", "1 [10]", "1 [6, 10]", "1 [10]"]


class TooLateError(Exception):
    """What the handlers of these tests raise."""


def raising(*_: Any) -> None:
    raise TooLateError


class Handler:
    """Handlers of all kinds: this instance, its method, a part, one that takes its own place."""

    def __call__(self, number: int, frame: Any) -> None:
        raise TooLateError

    def method(self, number: int, frame: Any) -> None:
        raising()

    def replaced(self, number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise TooLateError


HANDLERS: dict[str, Callable[..., Any]] = {
    "function": raising,
    "instance": Handler(),
    "method": Handler().method,
    "partial": functools.partial(Handler().method),
    "replaced": Handler().replaced,
}


@pytest.fixture
def _restored() -> Any:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call the function, and send the signal once before and once after the first call."""
    calls = []

    @functools.wraps(original)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGUSR1)
        result = original(*args, **kwargs)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGUSR1)
        return result

    return interrupted


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "stop_trace") for kind in HANDLERS),
        *(("function", each) for each in ("prepare_trace", "start_trace", "export_chrome_trace")),
    ],
)
def test_what_a_signal_handler_raises_goes_through_and_the_window_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, method: str
) -> None:
    monkeypatch.setattr(_KinetoProfile, method, interrupting(getattr(_KinetoProfile, method)))
    signal.signal(signal.SIGUSR1, HANDLERS[kind])
    raised = 0
    with Session(wait=1, warmup=1, active=2, repeat=2, output_dir=str(tmp_path)) as session:
        for _ in range(9):
            work()
            try:
                session.step()
            except TooLateError:
                raised += 1
    assert raised == 1
    assert steps_in(session) == [([2, 3], [2, 3]), ([6, 7], [6, 7])]


# Each follows a loop or a call with nothing in between at which Python handles signals; a trace function can do it.
NO_SIGNAL_BEFORE = {"finisher.py": "self._finishing = False", "signals.py": "self.delayed = True"}


def handlers_of_signals() -> list[Any]:
    return [signal.getsignal(each) for each in range(1, signal.NSIG)]


class AtLine:
    """A trace function that sends a signal before the line with this number, counted in `files`."""

    def __init__(self, line: int, number: int, files: tuple[str, ...]) -> None:
        self.line, self.number, self.files, self.lines = line, number, files, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> AtLine | None:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        file = frame.f_code.co_filename
        line = linecache.getline(file, frame.f_lineno).strip()
        if event == "line" and not line.startswith(NO_SIGNAL_BEFORE.get(Path(file).name, "\n")):
            self.lines += 1
            if self.lines == self.line:
                signal.raise_signal(self.number)
        return self

    def call(self, act: Callable[[], Any]) -> None:
        def within() -> Iterator[None]:
            yield act()

        before = sys.gettrace()
        sys.settrace(self)
        try:
            # an exception that a trace function raises can leave another one current for ever, so
            # that it is the context of all later ones; a generator has a current one of its own
            next(within())
        finally:
            sys.settrace(before)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("error", "number", "files", "every"),
    [
        (TooLateError, signal.SIGUSR1, ("step_loop.py", "recorder.py", "signals.py"), 293),
        (KeyboardInterrupt, signal.SIGINT, ("window.py", "finisher.py"), 7),
        pytest.param(
            KeyboardInterrupt,
            signal.SIGINT,
            ("step_loop.py", "recorder.py", "signals.py"),
            149,
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            KeyboardInterrupt,
            signal.SIGINT,
            ("window.py", "finisher.py"),
            2,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_wherever_in_a_step_a_signal_arrives_its_exception_goes_through_and_windows_are_whole(
    tmp_path: Path, error: type[BaseException], number: int, files: tuple[str, ...], every: int
) -> None:
    signal.signal(signal.SIGUSR1, raising)
    handlers = handlers_of_signals()
    options = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    line, raised = 3, 1
    while raised:
        raised, trace = 0, AtLine(line, number, files)
        folder = tmp_path / str(line)
        with Session(**options, output_dir=str(folder)) as session:
            for _ in range(10):
                work()
                try:
                    trace.call(session.step)
                except error:
                    raised += 1
        assert raised == (trace.lines >= line)
        assert steps_in(session) == [([2, 3], [2, 3]), ([6, 7], [6, 7])], f"line {line}"
        assert handlers_of_signals() == handlers
        line += every
    assert line > 1000 or "window.py" in files
    assert sys.exc_info()[1] is None


@pytest.mark.usefixtures("_restored")
def test_wherever_signals_are_delayed_one_arrives_the_handlers_are_restored() -> None:
    def delay_signals() -> None:
        with uninterrupted():
            pass

    signal.signal(signal.SIGUSR1, raising)
    handlers = handlers_of_signals()
    line, raised = 1, True
    while raised:
        trace = AtLine(line, signal.SIGUSR1, ("signals.py",))
        try:
            trace.call(delay_signals)
            raised = False
        except TooLateError:
            line += 1
        assert handlers_of_signals() == handlers, line
    assert line == trace.lines + 1 > 100


@pytest.mark.usefixtures("_restored")
def test_a_handler_that_raises_while_handlers_are_restored_leaves_none_replaced() -> None:
    def other(*_: Any) -> None: ...

    before = signal.signal(signal.SIGUSR2, other)
    signal.signal(signal.SIGUSR1, raising)

    def between(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name == "_restore" and signal.getsignal(signal.SIGUSR1) is raising:
            sys.settrace(None)
            assert signal.getsignal(signal.SIGUSR2) is not other
            signal.raise_signal(signal.SIGUSR1)
        return between

    tracing = sys.gettrace()
    try:
        with pytest.raises(TooLateError), uninterrupted():
            sys.settrace(between)
        assert signal.getsignal(signal.SIGUSR1) is raising
        assert signal.getsignal(signal.SIGUSR2) is other
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGUSR2, before)


def action_of(number: int) -> tuple[str, bool]:
    """Which handler the system has for a signal, and whether calls that it interrupts go on."""
    action = ctypes.create_string_buffer(512)
    ctypes.CDLL(None).sigaction(number, None, action)
    handler = ctypes.c_size_t.from_buffer(action).value
    # in Linux's struct for most machines, the flags follow a set of 128 bytes
    restarts = ctypes.c_int.from_buffer(action, 8 + 128).value & 0x10000000
    return hex(handler), bool(restarts)


@pytest.mark.skipif(sys.platform != "linux", reason="reads a struct of Linux's libc")
@pytest.mark.parametrize("chain", [False, True])
def test_flags_of_signals_and_handlers_in_c_stay(tmp_path: Path, chain: bool) -> None:
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]
    before = [signal.getsignal(number) for number in numbers]
    received: list[int] = []
    dumped = (tmp_path / "stacks.txt").open("w+")
    try:
        for number in numbers[1:]:
            signal.signal(number, lambda number, _: received.append(number))
            signal.siginterrupt(number, False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            kept = chain and number != signal.SIGTERM
            faulthandler.register(number, file=dumped, all_threads=False, chain=kept)
        actions = [action_of(number) for number in numbers]
        assert actions[1][1]
        options = {"triggers": ["signal"], "at_steps": [2], "warmup": 1, "active": 2}
        with Session(**options, output_dir=tmp_path) as session:
            for _ in range(6):
                work()
                assert [action_of(number) for number in numbers] == actions
                signal.raise_signal(signal.SIGTERM)
                session.step()
        assert [action_of(number) for number in numbers] == actions
        signal.raise_signal(signal.SIGHUP)
        assert received == [signal.SIGHUP] * chain
        assert dumped.seek(0) == 0
        assert dumped.read().count("most recent call first") == 7
    finally:
        for number, handler in zip(numbers, before):
            faulthandler.unregister(number)
            signal.signal(number, handler)
        dumped.close()


@pytest.mark.usefixtures("_restored")
def test_an_event_loop_is_told_once_of_a_signal_that_was_delayed() -> None:
    received: list[int] = []

    async def main() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, received.append, 1)
        loop.add_signal_handler(signal.SIGUSR2, done.set)
        with uninterrupted():
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        await done.wait()

    asyncio.run(main())
    assert received == [1]


class Swallowing(Sink):
    """A sink that catches what a signal handler raises."""

    def write(self, capture: Capture, folder: Path) -> None:
        with suppress(TooLateError):
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.usefixtures("_restored")
def test_what_a_handler_raises_goes_through_even_if_a_sink_catches_it(tmp_path: Path) -> None:
    signal.signal(signal.SIGUSR1, raising)
    sinks = {"mine": Swallowing()}
    with Session(active=1, sinks=sinks, output_dir=str(tmp_path)) as session:
        with pytest.raises(TooLateError):
            session.step()
        assert steps_in(session) == [([0], [0])]


@pytest.mark.usefixtures("_restored")
def test_interrupted_finish_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "rewrite", interrupting(window.rewrite))
    signal.signal(signal.SIGUSR1, raising)
    with Session(active=1, output_dir=str(tmp_path)) as session:
        with pytest.raises(TooLateError):
            session.step()
        assert not session.captures
    assert steps_in(session) == [([0], [0])]


@pytest.mark.usefixtures("_restored")
def test_interrupted_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    log.expect("exception TooLateError")
    monkeypatch.setattr(_KinetoProfile, "prepare_trace", interrupting(_KinetoProfile.prepare_trace))
    signal.signal(signal.SIGUSR1, raising)
    options: dict[str, Any] = {"phases": ["validation"], "active": 1}
    with Session(**options, output_dir=str(tmp_path)) as session:
        with pytest.raises(TooLateError), session.phase("validation"):
            pytest.fail("the exception was swallowed")
        session.step()
        assert session.step_number == 1


class Interrupting:
    """A value of a label, during whose formatting a signal arrives."""

    def __format__(self, _: str) -> str:
        signal.raise_signal(signal.SIGUSR1)
        return "reached"


@pytest.mark.usefixtures("_restored")
def test_ctrl_c_in_a_label_or_timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        backends.format_label("{value}", {"value": Interrupting()})
    signal.signal(signal.SIGUSR1, raising)
    with pytest.raises(TooLateError):
        backends.format_label("{value}", {"value": Interrupting()})
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    monkeypatch.setattr(timings, "_append", interrupting(timings._append))
    with Session(at_steps=[], timings={"every": 1}, output_dir=str(tmp_path)) as session:
        with pytest.raises(KeyboardInterrupt):
            session.step()
        session.step()


def test_stopped_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """As near the recursion limit, where the second try fails like the first."""
    right, calls = Recorder._detach, []

    def failing(self: Recorder) -> None:
        calls.append(None)
        if len(calls) < 3:
            raise RecursionError("too deep")
        right(self)

    monkeypatch.setattr(Recorder, "_detach", failing)
    with Session(wait=1, active=1, repeat=3, output_dir=str(tmp_path)) as session:
        for _ in range(6):
            work()
            session.step()
    assert steps_in(session) == [([3], [3]), ([5], [5])]
    assert "The profiler could not be stopped: too deep." in log.at("ERROR")[0]


@pytest.mark.parametrize("start", [0, 1])
def test_trigger_stops_the_session(tmp_path: Path, start: int, log: Log) -> None:
    """After a step outside windows, and after a step at which a window ends."""
    if start == 0:
        log.expect("before the first window")

    class Stopping:
        def fires(self, step: Step) -> None:
            if step.number == start:
                session.stop()

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    triggers = {"mine": Stopping(), "signal": {"name": "SIGUSR2"}}
    session = Session(wait=1, active=1, triggers=triggers, output_dir=str(tmp_path))
    with session:
        for _ in range(4):
            session.step()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)] == before


def looks_for_source(what: object) -> None:
    """Raise an error within functions that were called with the frames of their callers."""
    exec("import inspect\ninspect.getsource(inspect.currentframe())")


class LooksForSource(Sink):
    def write(self, capture: Capture, folder: Path) -> None:
        looks_for_source(folder)


class LossOfFrames:
    __float__ = looks_for_source


def test_error_of_a_function_with_a_frame(tmp_path: Path, log: Log) -> None:
    class Mine:
        def fires(self, step: Step) -> None:
            looks_for_source(step)

    options: dict[str, Any] = {"sinks": {"mine": LooksForSource()}, "triggers": {"own": Mine()}}
    with Session(at_steps=[1], active=1, **options, output_dir=tmp_path) as session:
        for _ in range(4):
            session.step(LossOfFrames())
    assert len(session.captures) == 1
    assert len(log.at("ERROR")) == 2
    assert "triggers get no loss" in log.at("WARNING")[0]


class Interrupted:
    """A trigger during which a signal arrives."""

    def fires(self, step: Step) -> str | None:
        if step.number == 3:
            signal.raise_signal(signal.SIGUSR1)
        return None


class Loss:
    """A loss whose conversion a signal interrupts."""

    def __float__(self) -> float:
        signal.raise_signal(signal.SIGUSR1)
        return 1.0


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("within", ["trigger", "loss"])
def test_base_exception(tmp_path: Path, log: Log, within: str, error: type[BaseException]) -> None:
    def handler(*_: Any) -> None:
        raise error

    signal.signal(signal.SIGUSR1, handler)
    triggers = {"mine": Interrupted()}
    session = Session(at_steps=[], active=1, triggers=triggers, output_dir=str(tmp_path))

    def run() -> None:
        with session:
            for step in range(9):
                session.step(loss=Loss() if within == "loss" and step == 2 else None)

    with pytest.raises(error):
        run()
    assert not [line for line in log if "fail" in line]


class InterruptedAt:
    """A trigger during one of whose callbacks, `place`, a signal arrives."""

    def __init__(self, place: str) -> None:
        self.place = place

    def fires(self, step: Step) -> None:
        if step.number == 1:
            self.at("fires")

    def begin(self, *_: Any) -> TriggerCallbacks:
        self.at("begin")
        return TriggerCallbacks(
            self.fires, failed=lambda *_: self.at("failed"), end=lambda: self.at("end")
        )

    def at(self, place: str) -> None:
        if place == self.place:
            self.place = ""
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("kind", HANDLERS)
@pytest.mark.parametrize("place", ["begin", "fires", "loss", "failed", "end"])
def test_error_of_a_signal_handler(tmp_path: Path, log: Log, place: str, kind: str) -> None:
    """Here no window begins or ends, so nothing else notes what a handler raises."""
    signal.signal(signal.SIGUSR1, HANDLERS[kind])
    triggers = {"mine": InterruptedAt(place)}
    session = Session(at_steps=[], active=1, triggers=triggers, output_dir=str(tmp_path))

    def run() -> None:
        with session:
            for step in range(4):
                session.step(loss=Loss() if place == "loss" and step == 2 else None)
            if place == "failed":
                raise KeyError

    with pytest.raises(TooLateError):
        run()
    session.stop()
    assert not [line for line in log if "fail" in line or "could not" in line]


def test_sigterm_is_passed_on_once(tmp_path: Path, log: Log) -> None:
    """Only the main thread can take our handler away."""
    log.expect("before the first window")
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        session = Session(wait=100, active=1, output_dir=str(tmp_path))
        for _ in range(2):
            session.start()
            thread = threading.Thread(target=session.stop)
            thread.start()
            thread.join()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_log_sink_that_raises_costs_no_window_and_its_messages_go_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str, log: Log
) -> None:
    log.expect("the run ended")

    def broken(message: Any) -> None:
        if message.record["level"].name == level:
            raise RuntimeError("the sink is broken")

    handler = logger.add(broken, catch=False)
    try:
        with Session(wait=1, active=100, output_dir=str(tmp_path)) as session:
            for _ in range(4):
                work()
                session.step()
    finally:
        logger.remove(handler)
    assert steps_in(session) == [([1, 2, 3], [1, 2, 3])]
    printed = capsys.readouterr().err
    expected = {"INFO": "INFO: Profiler records steps", "WARNING": "WARNING: The window of steps"}
    assert expected[level] in printed
    assert "(a log sink failed: the sink is broken)" in printed


@pytest.mark.usefixtures("_restored")
def test_handler_stops_the_session_in_a_sink(tmp_path: Path, log: Log) -> None:
    log.expect("saved but not finished")

    class Interrupted(Sink):
        def write(self, capture: Capture, folder: Path) -> None:
            signal.raise_signal(signal.SIGUSR1)

    session = Session(active=1, sinks={"own": Interrupted()}, output_dir=tmp_path)
    signal.signal(signal.SIGUSR1, lambda *_: session.stop())
    with session:
        work()
        session.step()
    assert steps_in(session) == [([0], [0])]
    assert log.at("ERROR") == []
