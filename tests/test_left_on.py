"""A test that leaves something on fails, and those after it do not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import warm

TESTS = Path(__file__).parent

# Between two that leave something on, one that works only where nothing is.
MADE = """
import signal

import pytest
import torch
from loguru import logger

from instrument import Session, instrument_model
from instrument.annotate import backends, modules

kept = []
model = torch.nn.Linear(1, 1)


def session(folder):
    kept.append(Session(active=1, wait=5, output_dir=folder, export="inline").start())


def window(folder):
    kept.append(Session(active=None, output_dir=folder, export="inline", model=model).start())
    model(torch.ones(1))


def window_with_memory(folder):
    kept.append(Session(active=None, output_dir=folder, export="inline", profile_memory=True).start())


def annotations(folder):
    backends.arm()


def profiler(folder):
    kept.append(torch.profiler.profile())
    kept[-1].start()


def handlers(folder):
    signal.signal(signal.SIGTERM, lambda *_: None)
    logger.add(kept.append)
    logger.disable("instrument")


def clean(folder):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not modules._instrumented
    lines = []
    handler = logger.add(lines.append)
    instrument_model(model)
    with Session(active=1, output_dir=folder, export="inline") as session:
        torch.ones(1) + 1
        session.step()
    logger.remove(handler)
    assert "aten::add" in session.captures[0].operators.column("name")
    assert lines


LEAVE = [session, window, window_with_memory, annotations, profiler, handlers]


@pytest.mark.parametrize("do", [each for leave in LEAVE for each in (leave, clean)])
@pytest.mark.parametrize("fails", [True, False])
def test_made(fails, do, tmp_path):
    do(tmp_path)
    assert do is clean or not fails, "in the middle"
"""


def test_what_a_test_leaves_on_fails_it_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(MADE)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # to load all installed plugins takes a second
    }
    options = "-p conftest -p no:cacheprovider -q -rA test_made.py"
    done = warm.run_apart(["-m", "pytest", *options.split()], tmp_path, environment)
    lines = done.stdout.splitlines()
    assert re.match(r"6 failed, 18 passed, (\d warnings, )?12 errors", lines[-1]), done.stdout
    assert not [line for line in lines if line.startswith(("FAILED", "ERROR")) and "clean" in line]
    for left in (
        "a session that runs",
        "a profiler that is on",
        "annotations that are armed",
        "another handler of SIGTERM, a handler of the log",
    ):
        assert f"E       AssertionError: The test left behind {left}." in lines
