"""What the program does beside a window: its own profilers, its signal handlers, its log sinks."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log
from loguru import logger
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from torch.profiler.profiler import _KinetoProfile

from instrument import Session
from instrument.config.step_actions import StepActions
from instrument.errors import ConfigError
from instrument.triggers import Step

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
def test_a_profiler_that_the_program_starts_records_all_and_ends_our_window(
    tmp_path: Path, log: Log, begins: int, kept: list[Any], on: str
) -> None:
    """Step 1 is the warm-up; the profiler is still on when the window of steps 2 to 4 should end."""
    same = on == "the same thread"
    own = profile(activities=CPU) if same else OnThread()
    with Session(wait=1, warmup=1, active=3, repeat=1, output_dir=str(tmp_path)) as session:
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


def test_a_profiler_that_begins_and_ends_within_a_window_costs_the_rest_of_the_window(
    tmp_path: Path, log: Log
) -> None:
    with Session(wait=0, active=4, repeat=2, output_dir=str(tmp_path)) as session:
        for step in range(8):
            if step == 1:
                with profile(activities=CPU) as own:
                    work()
            work()
            session.step()
    assert multiplications(own) == 1
    assert steps_in(session) == [([0], [0]), ([4, 5, 6, 7], [4, 5, 6, 7])]
    assert (
        "ended early, after 1 of 4 steps (the program started another profiler)"
        in log.at("WARNING")[0]
    )


def test_a_window_does_not_begin_while_a_profiler_of_the_program_is_on_or_warms_up(
    tmp_path: Path, log: Log
) -> None:
    log.errors_expected = True
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
    "method", ["prepare_trace", "start_trace", "stop_trace", "export_chrome_trace"]
)
@pytest.mark.parametrize("kind", HANDLERS)
def test_what_a_signal_handler_raises_goes_through_and_the_window_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, method: str
) -> None:
    monkeypatch.setattr(_KinetoProfile, method, interrupting(getattr(_KinetoProfile, method)))
    signal.signal(signal.SIGUSR1, HANDLERS[kind])
    raised = 0
    with Session(
        wait=1, warmup=1, active=2, repeat=2, export="inline", output_dir=str(tmp_path)
    ) as session:
        for _ in range(9):
            work()
            try:
                session.step()
            except TooLateError:
                raised += 1
    assert raised == 1
    assert steps_in(session) == [([2, 3], [2, 3]), ([6, 7], [6, 7])]


class Interrupted:
    """A trigger and a schedule during which a signal arrives."""

    def fires(self, step: Step) -> str | None:
        if step.number == 3:
            signal.raise_signal(signal.SIGUSR1)
        return None

    def action(self, step: int) -> ProfilerAction:
        if step == 4:
            signal.raise_signal(signal.SIGUSR1)
        return ProfilerAction.NONE


class Loss:
    """A loss whose conversion a signal interrupts."""

    def __float__(self) -> float:
        signal.raise_signal(signal.SIGUSR1)
        return 1.0


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("error", [TooLateError, SystemExit])
@pytest.mark.parametrize("within", ["trigger", "schedule", "loss"])
def test_what_a_handler_raises_within_a_trigger_a_schedule_or_a_loss_goes_through(
    tmp_path: Path, log: Log, within: str, error: type[BaseException]
) -> None:
    def handler(*_: Any) -> None:
        raise error

    signal.signal(signal.SIGUSR1, handler)
    options: dict[str, Any] = {
        "trigger": {"at_steps": [], "active": 1, "triggers": {"mine": Interrupted()}},
        "schedule": {"schedule": Interrupted().action},
        "loss": {"at_steps": [], "active": 1, "triggers": {"mine": Interrupted()}},
    }[within]
    session = Session(**options, output_dir=str(tmp_path))

    def run() -> None:
        with session:
            for step in range(9):
                session.step(loss=Loss() if within == "loss" and step == 2 else None)

    with pytest.raises(error):
        run()
    assert not [line for line in log if "fail" in line]


def test_system_exit_in_a_schedule_ends_its_windows_and_not_the_training(
    tmp_path: Path, log: Log
) -> None:
    def leaving(step: int) -> ProfilerAction:
        if step > 3:
            raise SystemExit("enough")
        return ProfilerAction.NONE

    with Session(schedule=leaving, output_dir=str(tmp_path)) as session:
        for _ in range(9):
            session.step()
    assert session.step_number == 9
    assert "profiler.schedule fails for step 4 (enough)" in log.at("WARNING")[0]

    def never(step: int) -> ProfilerAction:
        raise SystemExit("enough")

    with pytest.raises(ConfigError, match=r"fails for step 0 \(enough\)"):
        StepActions(never)


def test_a_session_stopped_on_another_thread_and_started_again_passes_sigterm_on_once(
    tmp_path: Path,
) -> None:
    """Only the main thread can take our handler away."""
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str
) -> None:
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
