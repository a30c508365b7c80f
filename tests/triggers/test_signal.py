from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from collected import Log

from instrument import Session

pytestmark = pytest.mark.usefixtures("inline_export")

SIGNAL = signal.SIGUSR2


@pytest.fixture(autouse=True)
def received() -> Iterator[list[int]]:
    """What the handler that was there before has received; puts back what this process had."""
    numbers: list[int] = []
    before = signal.signal(SIGNAL, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(SIGNAL, before)


def session(folder: Path, **options: Any) -> Session:
    return Session(
        {"at_steps": [], "active": 2, "output_dir": folder, **options}, triggers=["signal"]
    )


def test_earlier_handler_is_called(tmp_path: Path, received: list[int]) -> None:
    before = signal.getsignal(SIGNAL)
    with session(tmp_path) as running:
        for number in range(6):
            if number == 2:
                os.kill(os.getpid(), SIGNAL)
            running.step()
    assert signal.getsignal(SIGNAL) is before
    assert received == [SIGNAL]
    (capture,) = running.captures
    assert capture.steps.column("number") == [3, 4]
    about = capture.metadata["window"]
    assert (about["trigger"], about["trigger_reason"]) == ("signal", "SIGUSR2 was received")


def test_a_signal_within_a_window_is_kept_for_the_next(tmp_path: Path) -> None:
    with session(tmp_path, at_steps=[1]) as running:
        for number in range(8):
            if number == 2:
                os.kill(os.getpid(), SIGNAL)
            running.step()
    assert [capture.steps.column("number") for capture in running.captures] == [[1, 2], [4, 5]]


def test_a_handler_set_meanwhile_is_left_in_place(tmp_path: Path) -> None:
    running = session(tmp_path).start()
    theirs = lambda number, frame: None  # noqa: E731
    signal.signal(SIGNAL, theirs)
    running.stop()
    assert signal.getsignal(SIGNAL) is theirs


def test_what_was_ignored_is_ignored_again(tmp_path: Path) -> None:
    signal.signal(SIGNAL, signal.SIG_IGN)
    with session(tmp_path) as running:
        os.kill(os.getpid(), SIGNAL)
        running.step()
        running.step()
        running.step()
    assert len(running.captures) == 1
    assert signal.getsignal(SIGNAL) is signal.SIG_IGN


def test_a_handler_of_c_code_stays_and_the_trigger_says_so(tmp_path: Path, log: Log) -> None:
    signal.signal(SIGNAL, signal.SIG_DFL)
    with (tmp_path / "stacks.txt").open("w+") as dumped:
        faulthandler.register(SIGNAL, file=dumped, all_threads=False)
        with session(tmp_path) as running:
            os.kill(os.getpid(), SIGNAL)
            running.step()
        os.kill(os.getpid(), SIGNAL)
        faulthandler.unregister(SIGNAL)
        dumped.seek(0)
        assert dumped.read().count("most recent call first") == 2
    (warning,) = log.at("WARNING")
    assert warning.startswith("The signal trigger does nothing: code in C, such as faulthandler")


def test_off_the_main_thread_it_says_so_once_and_the_session_runs(tmp_path: Path, log: Log) -> None:
    running, before = session(tmp_path, at_steps=[0]), signal.getsignal(SIGNAL)

    def run() -> None:
        with running:
            running.step()
            running.step()

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert log.at("WARNING") == [
        "The signal trigger does nothing: the session was not started on the main thread."
    ]
    assert len(running.captures) == 1
    assert signal.getsignal(SIGNAL) is before
