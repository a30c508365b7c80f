"""A hook that the program has set itself, by `sys.setprofile`, around windows with stacks."""

from __future__ import annotations

import cProfile
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log

from instrument import Session

pytestmark = pytest.mark.usefixtures("inline_export")


@pytest.fixture(autouse=True)
def _no_hook_left() -> Iterator[None]:
    yield
    sys.setprofile(None)
    threading.setprofile(None)


def hook(*_: Any) -> None:
    pass


def record(folder: Path, **options: Any) -> None:
    with Session(
        active=1, warmup=1, wait=1, output_dir=folder, with_stack=True, **options
    ) as session:
        for _ in session.steps(range(4)):
            torch.ones(4).sum()


def test_the_hook_is_there_again_after_the_window(tmp_path: Path, log: Log) -> None:
    sys.setprofile(hook)
    record(tmp_path)
    assert sys.getprofile() is hook
    assert log.at("WARNING") == []


def test_where_none_was_there_is_none(tmp_path: Path) -> None:
    record(tmp_path)
    assert sys.getprofile() is None


def test_a_window_that_only_warmed_up_gives_it_back_too(tmp_path: Path, log: Log) -> None:
    sys.setprofile(hook)
    with Session(active=1, warmup=3, output_dir=tmp_path, with_stack=True) as session:
        session.step()
    assert sys.getprofile() is hook
    assert "before the first window" in log.at("WARNING")[0]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there cProfile has no hook of this kind")
def test_a_hook_that_cannot_be_set_again_is_warned_of(tmp_path: Path, log: Log) -> None:
    profile = cProfile.Profile()
    profile.enable()
    record(tmp_path)
    profile.disable()
    (warning,) = log.at("WARNING")
    assert warning.startswith("profiler.with_stack=true has stopped <cProfile.Profile object")
    assert warning.endswith(
        "Only the code that started this profile hook can start it again: use either with_stack or "
        "this hook."
    )


def test_hooks_of_other_threads_are_warned_of(tmp_path: Path, log: Log) -> None:
    threading.setprofile(hook)
    sys.setprofile(hook)
    record(tmp_path)
    assert sys.getprofile() is hook
    assert log.at("WARNING") == [
        "profiler.with_stack=true has removed the hook of threading.setprofile from the other running threads: "
        "set it there again."
    ]
