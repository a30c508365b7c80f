"""Sessions and threads: who may step, what torch cannot record, and what becomes of it. No thread ends the process."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from queue import Queue
from textwrap import dedent
from threading import Barrier, Event, Thread
from types import SimpleNamespace
from typing import Any

import compat
import pytest
import torch
import warm
from collected import Log

from instrument import Session
from instrument.base import threads
from instrument.read.views.coverage import range_advice
from instrument.record import recorder, step_loop
from instrument.record.recorder import RecordedWindow, Recorder
from instrument.record.triggers import Request, RequestWindow, Trigger, TriggerCallbacks

pytestmark = pytest.mark.usefixtures("inline_export")


def in_thread(act: Callable[[], Any]) -> None:
    thread = Thread(target=act)
    thread.start()
    thread.join()


def profiler_is_on() -> bool:
    return bool(torch._C._autograd._profiler_enabled())


def outcome(done: subprocess.CompletedProcess[str]) -> str:
    """What a program printed, which no signal must have ended."""
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def new_process(code: str) -> str:
    """What a new process prints.

    After a thread has ended while its profiler was on, a forked process will not do: in a copy of
    a process that has loaded torch, torch itself fails now and then.
    """
    command = [sys.executable, "-c", dedent(code)]
    return outcome(subprocess.run(command, check=False, capture_output=True, text=True))


@pytest.mark.parametrize(
    ("other", "state", "expected"),
    [
        ("theirs", b"S", ["wait", "stop"]),
        ("theirs", b"R", [*["wait"] * 5, "stop"]),  # until it has had a CPU for a millisecond
        ("instrument-limits", b"R", ["stop"]),
    ],
)
def test_other_threads_are_recorded_no_more_when_torch_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, state: bytes, expected: list[str]
) -> None:
    """torch then frees its events, and a thread that still writes one would end the process."""
    stop, done = recorder._KinetoProfile.stop_trace, []

    def wait(seconds: float) -> None:
        done.append("wait")
        in_thread(lambda: torch.ones(2).cumprod(0))

    def stop_after(profile: Any) -> None:
        done.append("stop")
        stop(profile)

    running = [threading.current_thread(), Thread(name=other)]
    monkeypatch.setattr(recorder, "threading", SimpleNamespace(enumerate=lambda: running))
    clock = SimpleNamespace(time=time.time, sleep=wait, monotonic=lambda: 0.0)
    monkeypatch.setattr(recorder, "time", clock)
    ran_ns = itertools.count(7, 200_000)
    monkeypatch.setattr(recorder, "_cpu_times", lambda: {"1": (state, next(ran_ns))})
    monkeypatch.setattr(recorder._KinetoProfile, "stop_trace", stop_after)
    with Session(active=1, profile_all_threads=True, output_dir=tmp_path) as session:
        in_thread(lambda: torch.ones(2).cumsum(0))
        session.step()
    assert done == expected
    names = {row.name for row in session.captures[0].operators}
    assert "aten::cumsum" in names
    assert "aten::cumprod" not in names


def test_starved_thread_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(time=time.time, sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr(recorder, "time", clock)
    monkeypatch.setattr(recorder, "_cpu_times", lambda: {"1": (b"R", 7)})
    running = [threading.current_thread(), Thread()]
    monkeypatch.setattr(recorder, "threading", SimpleNamespace(enumerate=lambda: running))
    with Session(active=1, profile_all_threads=True, output_dir=tmp_path) as session:
        session.step()
    assert 1 <= sum(slept) < 1.1


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_state_and_cpu_time_of_other_threads_are_known() -> None:
    over = Event()
    sleeps = Thread(target=over.wait)
    runs = Thread(target=lambda: deque(iter(over.is_set, True), maxlen=0))
    for each in (sleeps, runs):
        each.start()
    began = recorder._cpu_times()
    while (now := recorder._cpu_times())[str(sleeps.native_id)][0] != b"S" or (
        now[str(runs.native_id)][1] == began[str(runs.native_id)][1]
    ):
        pass  # the test hangs if this is never so
    over.set()
    for each in (sleeps, runs):
        each.join()
    assert str(threading.get_native_id()) not in now


@pytest.mark.nightly
@pytest.mark.parametrize("all_threads", [True, False])
def test_windows_beside_busy_threads(tmp_path: Path, all_threads: bool) -> None:
    """torch alone ends the process within a hundred such windows, nearly always."""
    done = warm.run_code(f"""
        import sys, threading, torch
        from instrument import Session
        torch.set_num_threads(1)
        sys.setswitchinterval(1e-4)  # the threads take turns more often than usual
        net, over = torch.nn.Linear(8, 1), threading.Event()
        def work():
            while not over.is_set():
                net(torch.ones(4, 8)).sum().backward()
        workers = [threading.Thread(target=work) for _ in range(3)]
        options = dict(active=1, repeat=0, keep=1, export="inline", output_dir={str(tmp_path)!r})
        with Session(**options, profile_all_threads={all_threads}) as session:
            [worker.start() for worker in workers]
            for _ in range(100):
                net(torch.ones(4, 8))
                session.step()
        over.set()
        print("STEPS", session.step_number, len(session.captures))
    """)
    assert "STEPS 100 1" in outcome(done)


def test_a_range_that_outlives_its_window_writes_into_no_other(tmp_path: Path) -> None:
    """torch would write its end into memory that is somebody else's by then."""
    done = warm.run_code(f"""
        import torch
        from instrument import Session, profiled
        with Session(active=1, repeat=0, keep=1, export="inline", output_dir={str(tmp_path)!r}) as session:
            for _ in range(2):
                ranges = [profiled(f"range {{k}}").__enter__() for k in range(1000)]
                session.step()
                junk = [str(k) * 20 for k in range(16_000)]
                tensors = [torch.zeros(7) for _ in range(1000)]
                for each in reversed(ranges):
                    each.__exit__()
                assert junk == [str(k) * 20 for k in range(16_000)]
                assert all(tensor.sum() == 0 for tensor in tensors)
                session.step()
        print("CAPTURE", len(session.captures))
    """)
    assert "CAPTURE 1" in outcome(done)


def test_two_sessions_in_two_threads_take_turns(tmp_path: Path) -> None:
    done = warm.run_code(f"""
        import threading, torch
        from instrument import Session
        net = torch.nn.Linear(8, 1)
        def run():
            with Session(wait=1, active=1, repeat=0, export="inline", output_dir={str(tmp_path)!r}) as session:
                for _ in session.steps(range(8)):
                    net(torch.ones(4, 8)).sum().backward()
            print("STEPS", session.step_number)
        both = [threading.Thread(target=run) for _ in range(2)]
        [each.start() for each in both]
        [each.join() for each in both]
    """)
    assert outcome(done).count("STEPS 8") == 2


@pytest.mark.parametrize("memory", [True, False])
def test_step_on_another_thread(tmp_path: Path, log: Log, memory: bool) -> None:
    with Session(active=3, repeat=3, profile_memory=memory, output_dir=tmp_path) as session:
        for _ in range(2):
            session.step()
        for _ in range(2):
            in_thread(session.step)
            assert not session._loop.recording
        assert profiler_is_on(), "only this thread can stop it"
        session.step()
        assert not profiler_is_on(), "its own thread has come back"
        for _ in range(6):
            torch.ones(2) + 1
            session.step()
    assert not profiler_is_on()
    assert [capture.steps.column("number") for capture in session.captures] == [[6, 7, 8]]
    (error,) = log.at("ERROR")
    assert "A window began on the thread MainThread and continued on the thread Thread-" in error
    assert error.endswith(
        "call session.step() from one thread, or record all threads "
        f"(profiler.profile_all_threads=true{' and profile_memory=false' * memory})."
    )


@pytest.mark.parametrize("then", ["step", "stop"])
def test_stop_on_another_thread(tmp_path: Path, log: Log, then: str) -> None:
    log.expect("Recording failed and training goes on")
    session = Session(active=3, preemption_grace_s=None, output_dir=tmp_path / "first").start()
    session.step()
    in_thread(session.stop)
    assert profiler_is_on()
    assert "torch's profiler is still on in the thread MainThread" in log.at("WARNING")[-1]
    getattr(session, then)()
    assert not profiler_is_on()
    with Session(active=1, output_dir=tmp_path / "second") as later:
        later.step()
    assert (len(session.captures), len(later.captures)) == (0, 1)


@pytest.mark.nightly  # starts a new interpreter: see `new_process`
def test_a_window_whose_thread_has_ended_costs_itself_alone(tmp_path: Path) -> None:
    """Nor does it corrupt the memory of a later window, or end the process at exit."""
    said = new_process(f"""
        import sys, torch
        from loguru import logger
        from threading import Thread
        from instrument import Session
        logger.add(sys.stdout)
        def session(folder):
            return Session(active=2, repeat=9, export="inline", output_dir=folder)
        first, last = session({str(tmp_path / "first")!r}), session({str(tmp_path / "last")!r})
        def begin():
            first.start()
            first.step()
        def in_thread(act):
            thread = Thread(target=act)
            thread.start()
            thread.join()
        for act in (begin, *[first.step] * 8):
            in_thread(act)
        for _ in range(4):
            torch.ones(2) + 1
            first.step()
        first.stop()
        print("STEPS", [capture.steps.column("number") for capture in first.captures])
        in_thread(last.start)  # its profiler is on at exit
    """)
    if "records nothing in this process: call session.step() on a thread that does not end" in said:
        assert not torch.__version__.startswith(compat.PINNED), "older torch alone"
        assert "STEPS []" in said
    else:
        assert "STEPS [[10, 11], [12]]" in said


@pytest.mark.nightly  # starts a new interpreter: see `new_process`
@pytest.mark.parametrize("all_threads", [True, False])
def test_thread_of_a_window_has_ended(tmp_path: Path, all_threads: bool) -> None:
    said = new_process(f"""
        import sys, torch
        from loguru import logger
        from threading import Thread
        from instrument import Session
        logger.add(sys.stdout)
        options = dict(active=5, export="inline", output_dir={str(tmp_path)!r})
        session = Session(**options, profile_all_threads={all_threads})
        def begin():
            session.start()
            session.step()
        thread = Thread(target=begin, name="the trainer")
        thread.start()
        thread.join()
        torch.ones(2) + 1
    """)
    assert ("it is kept and labelled truncated" in said) == all_threads
    dropped = "The thread the trainer began a window and has ended, so the window is dropped"
    assert (dropped in said) != all_threads


def test_steps_of_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a step waits as long as another thread takes to begin or end the window
    monkeypatch.setattr(step_loop, "_WAIT_S", 120.0)
    begin = Barrier(3)

    def train() -> None:
        begin.wait()
        for _ in range(40):
            torch.ones(8).sum()
            session.step()

    options: dict[str, Any] = {"wait": 5, "active": 20, "repeat": 2, "profile_all_threads": True}
    with Session(**options, output_dir=tmp_path) as session:
        workers = [Thread(target=train) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    steps = session.captures[0].steps
    assert steps.column("number") == list(range(5, 25))
    # no two steps at once
    assert all(one.start_ns + one.duration_ns <= other.start_ns for one, other in pairwise(steps))


def test_a_waiting_step_waits_for_no_thread(tmp_path: Path, log: Log) -> None:
    log.expect("before the first window")
    with Session(wait=100, active=1, output_dir=tmp_path) as session:
        locked, over = Event(), Event()

        def hold() -> None:
            with session._loop.lock:
                locked.set()
                over.wait(120)

        holder = Thread(target=hold)
        holder.start()
        locked.wait(120)
        for _ in range(50):
            session.step()
        assert session.step_number == 50
        over.set()
        holder.join()


def test_steps_while_a_window_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Recorder.stop

    def stop_late(recorder: Recorder) -> RecordedWindow | None:
        in_thread(session.step)
        return stop(recorder)

    monkeypatch.setattr(Recorder, "stop", stop_late)
    with Session(active=2, profile_all_threads=True, output_dir=tmp_path) as session:
        session.step()
        session.step()
        assert session.step_number == 3
    assert [capture.name for capture in session.captures] == ["steps_000000-000001_rank0"]


class Polled(Trigger):
    """Is asked between steps."""

    def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:
        return TriggerCallbacks(
            lambda step: Request("third") if step.number == 2 else None, poll=lambda: ask(Request())
        )


def test_no_thread_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    def none(self: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_warned", set())
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", none)
        options: dict[str, Any] = {"at_steps": [1, 6], "active": 1, "profile_all_threads": True}
        with Session(**options, output_dir=tmp_path, triggers={"mine": Polled()}) as session:
            for _ in range(9):
                session.step()
    assert [capture.steps.column("number") for capture in session.captures] == [[1], [3], [6]]
    assert log.at("WARNING") == [
        "No thread can be started (can't start new thread): the trigger mine is not polled between steps.",
        "No thread can be started (can't start new thread): a window's limits are checked only when a step ends.",
    ]


@pytest.mark.parametrize("all_threads", [True, False])
def test_model_on_an_unrecorded_thread(tmp_path: Path, log: Log, all_threads: bool) -> None:
    model, jobs, done = torch.nn.Sequential(torch.nn.Linear(2, 2)), Queue[Any](), Queue[Any]()

    def serve() -> None:
        while (given := jobs.get()) is not None:
            done.put(model(given))

    server = Thread(target=serve, name="the server")
    server.start()
    options: dict[str, Any] = {"active": 2, "profile_all_threads": all_threads}
    with Session(**options, model=model, output_dir=tmp_path) as session:
        for _ in range(3):
            jobs.put(torch.ones(1, 2))
            done.get()
            session.step()
    jobs.put(None)
    server.join()
    (capture,) = session.captures
    others = capture.metadata["threads_not_recorded"]
    assert bool(others) == (not any(row.name == "Sequential" for row in capture.ranges))
    if not all_threads:
        assert others == ["the server"]
        sentence = "odules ran on the thread the server, which is not recorded"
        assert sentence in log.at("WARNING")[0]
        assert sentence in range_advice(capture)


def train(session: Session, model: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        session.step()


@pytest.mark.parametrize("all_threads", [True, False])
def test_training_thread(tmp_path: Path, log: Log, all_threads: bool) -> None:
    """As with Ray Train, whose workers call the training function on a thread."""
    model = torch.nn.Linear(2, 2)
    options: dict[str, Any] = {"active": 2, "profile_all_threads": all_threads, "model": model}
    session = Session(wait=1, **options, output_dir=tmp_path)

    def run() -> None:
        with session:
            train(session, model, 4)

    in_thread(run)
    (capture,) = session.captures
    assert capture.steps.column("number") == [1, 2]
    assert [row.calls for row in capture.ranges.where(name="Linear")] == [2]
    assert capture.metadata["threads_not_recorded"] == []
    assert not log.at("WARNING")


@pytest.mark.parametrize("all_threads", [True, False])
def test_threads_of_a_step(tmp_path: Path, log: Log, all_threads: bool) -> None:
    """As in DataParallel, which calls a replica of the model on a thread for each device."""
    model = torch.nn.Linear(2, 2)
    options: dict[str, Any] = {"active": 2, "profile_all_threads": all_threads, "model": model}
    with Session(**options, output_dir=tmp_path) as session:
        for _ in range(3):
            replica = Thread(target=model, args=(torch.ones(1, 2),), name="replica")
            replica.start()
            replica.join()
            train(session, model, 1)
    (capture,) = session.captures
    assert capture.steps.column("number") == [0, 1]
    calls = [row.calls for row in capture.ranges.where(name="Linear")]
    assert calls == [4 if all_threads else 2]
    assert capture.metadata["threads_not_recorded"] == ([] if all_threads else ["replica"])
    assert bool(log.at("WARNING")) != all_threads


@pytest.mark.parametrize("all_threads", [True, False])
def test_calls_of_a_thread_pool(tmp_path: Path, log: Log, all_threads: bool) -> None:
    session = Session(active=3, profile_all_threads=all_threads, output_dir=tmp_path)
    predict = session.record(lambda: torch.ones(2).sum())
    for _ in range(4):  # each on a thread of its own, one after another
        in_thread(predict)
    session.stop()
    assert not profiler_is_on()
    recorded = [capture.steps.column("number") for capture in session.captures]
    assert recorded == ([[0, 1, 2]] if all_threads else [])
    if not all_threads:
        (error,) = log.at("ERROR")
        assert "or record all threads (profiler.profile_all_threads=true)." in error
