"""Runs of a script that answers: how they end, and which answers are refused."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from instrument.read.compare.trial_runs import (
    ChangeError,
    ScriptEndedError,
    ScriptError,
    ScriptRun,
    TimeUpError,
)

ANSWERING = """
import os, socket, sys
own = socket.socket(socket.AF_UNIX)
own.connect(os.environ["INSTRUMENT_TRIAL"])
lines = own.makefile("rw")
for answer in sys.argv[1:]:
    lines.write(answer + "\\n")
    lines.flush()
    lines.readline()
"""


def started(folder: Path, *words: str) -> ScriptRun:
    return ScriptRun([sys.executable, "-c", *words], folder, folder, {})


def until() -> float:
    return time.monotonic() + 600


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        "{",
        '{"ranks": 0}',
        '{"changes": [{"name": "fused"}]}',
        '{"changes": [{"name": "", "with": "../..", "does": "", "by_hand": "", "numbers": "same"}]}',
    ],
)
def test_an_odd_answer_is_refused(answer: str, tmp_path: Path) -> None:
    with started(tmp_path, ANSWERING, answer) as run, pytest.raises(ScriptError, match="odd"):
        run.start(until())


@pytest.mark.parametrize("answer", ["{}", '{"step_ns": 0}', '{"step_ns": "1"}'])
def test_a_time_that_is_odd_or_missing_is_refused(answer: str, tmp_path: Path) -> None:
    with started(tmp_path, ANSWERING, "{}", answer) as run:
        run.start(until())
        with pytest.raises(ScriptError, match="odd"):
            run.run(1, until())


def test_a_change_that_cannot_be_made_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    answers = ["{}", '{"error": "it does not fit"}', '{"step_ns": 7.5}']
    with started(tmp_path, ANSWERING, *answers) as run:
        run.start(until())
        with pytest.raises(ChangeError, match="it does not fit"):
            run.run(1, until(), changes="fused")
        assert run.run(1, until()) == 7.5
        for _ in range(2):  # also once its process is known to have ended
            with pytest.raises(ScriptEndedError, match="after 1 step"):
                run.run(1, until())
    with started(tmp_path, "") as run, pytest.raises(ScriptEndedError, match="--step"):
        run.start(until())


def test_the_error_of_a_script_is_said_and_not_what_it_prints_after_it(tmp_path: Path) -> None:
    code = """
import atexit, os
atexit.register(os.write, 2, b"bye\\n")
raise ValueError("no data")
"""
    with (
        started(tmp_path, code) as run,
        pytest.raises(ScriptError, match="status 1: ValueError: no data"),
    ):
        run.start(until())
    with (
        started(tmp_path, "print('first'); exit(3)") as run,
        pytest.raises(ScriptError, match="status 3: first"),
    ):
        run.start(until())


def test_a_script_that_was_killed_is_said_so(tmp_path: Path) -> None:
    with (
        started(tmp_path, "import os; os.kill(os.getpid(), 9)") as run,
        pytest.raises(ScriptError, match=r"signal 9 \(Killed\)"),
    ):
        run.start(until())


def test_a_run_without_steps_ends_with_the_budget(tmp_path: Path) -> None:
    with (
        started(tmp_path, "import signal; signal.pause()") as run,
        pytest.raises(TimeUpError, match=r"had ended$"),  # it has no output to name
    ):
        run.start(time.monotonic())
