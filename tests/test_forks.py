"""A process that is forked within a window, such as a worker of a data loader, records nothing."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import warm
from builders import span, write_trace
from torch.utils.data import DataLoader, Dataset
from waits import until

from instrument import Session
from instrument.record.recorder import Recorder

pytestmark = [
    pytest.mark.usefixtures("inline_export"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


def in_child(check: Callable[[], object]) -> bool:
    """Whether `check` returns a true value in a child that is forked now."""
    child = os.fork()
    if child == 0:
        passed = False
        signal.alarm(600)  # ends the child if it hangs
        try:
            passed = bool(check())
        finally:
            os._exit(0 if passed else 1)
    return os.waitpid(child, 0)[1] == 0


def work(times: int = 1) -> None:
    for _ in range(times):
        torch.ones(2, 2).add(1)


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten numbers, of which two say what is allocated, in bytes."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def allocated_bytes() -> int:
    """What malloc has handed out; unlike pages of memory, the same whatever ran before."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    numbers = mallinfo().numbers
    by_mmap, in_arenas = numbers[4], numbers[7]
    return by_mmap + in_arenas


def growth_in_child(file: Path) -> int:
    """The bytes of memory that 20,000 operators leave allocated in a child that is forked now."""

    def measure() -> int:
        work()
        before = allocated_bytes()
        work(20_000)
        return file.write_text(str(allocated_bytes() - before))

    assert in_child(measure)
    return int(file.read_text())


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33, which counts its memory"
)
@pytest.mark.parametrize(
    "options", [{}, {"record_shapes": True}, {"profile_memory": True}], ids=["", "shapes", "memory"]
)
def test_a_forked_child_keeps_no_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    with Session(output_dir=tmp_path, active=None, **options) as session:
        work()
        grown = growth_in_child(tmp_path / "grown")
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "leave_to_parent", lambda _: None)
            grown_with_events = growth_in_child(tmp_path / "grown with events")
        work()
    assert grown < grown_with_events / 100, "the child keeps events"
    (capture,) = session.captures
    calls = dict(zip(capture.operators.column("name"), capture.operators.column("calls")))
    assert calls["aten::add"] == 2


def test_a_forked_child_does_not_record_memory(tmp_path: Path) -> None:
    with Session(active=None, output_dir=tmp_path, profile_memory=True):
        assert torch._C._autograd._profiler_enabled()
        assert in_child(lambda: not torch._C._autograd._profiler_enabled())


def test_a_forked_child_does_not_record_python_stacks(tmp_path: Path) -> None:
    before = sys.getprofile()
    try:
        with Session(active=None, output_dir=tmp_path, with_stack=True):
            assert sys.getprofile() is not None
            assert in_child(lambda: sys.getprofile() is None)
    finally:
        sys.setprofile(before)


def test_a_forked_child_writes_nothing_into_the_execution_trace(tmp_path: Path) -> None:
    with Session(active=None, output_dir=tmp_path, execution_trace=True) as session:
        work()
        (written,) = tmp_path.glob(".execution_trace_*")
        assert is_open(written)
        assert in_child(lambda: not is_open(written))
        in_child(work)
        work()
    assert added(session) == 2


def is_open(path: Path) -> bool:
    return path.resolve() in [entry.resolve() for entry in Path("/dev/fd").iterdir()]


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2).add(index)


def test_execution_trace_with_loader_workers(tmp_path: Path) -> None:
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    with Session(active=None, output_dir=tmp_path, execution_trace=True) as session:
        for _ in loader:
            work()
    assert added(session) == 4


def added(session: Session) -> int:
    """How often the execution trace of the only capture holds `aten::add`; each node only once."""
    (capture,) = session.captures
    text = (capture.folder / "execution_trace.json").read_text()
    nodes = json.loads(text)["nodes"]
    assert len({node["id"] for node in nodes}) == len(nodes)
    return sum(node["name"] == "aten::add" for node in nodes)


_ENDS = """
import atexit, ctypes, os, sys, time, torch
from instrument import Session

def fork(end):
    child = os.fork()
    if child == 0:
        atexit.register(print, "last")
        atexit.register(print, "first")
        ctypes.CDLL(None).printf(b"printed by C\\n")  # to a pipe, so that it is buffered
        if end is not None:
            raise end
        return True
    until = time.monotonic() + 60
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, 9)
        time.sleep(0.01)
    print("status", os.waitstatus_to_exitcode(found[1]), flush=True)
    return False

def main():
    with Session(active=2, export="inline", output_dir=sys.argv[1]) as session:
        torch.ones(3).sum()
        if fork(SystemExit(4)): return
        for _ in range(2):
            session.step()
        if fork(SystemExit(3)): return
    if fork(ValueError("an error of the child")): return
    if fork(None): return

main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs on_exit of glibc")
def test_a_child_ends_as_it_would_without_a_window(tmp_path: Path) -> None:
    done = warm.run_code(_ENDS, str(tmp_path))
    lines = done.stdout.splitlines()
    assert [each for each in lines if each.startswith("status")] == [
        "status 4",
        "status 3",
        "status 1",
        "status 0",
    ]
    assert lines.count("first") == lines.count("last") == 4
    assert done.stdout.count("first\nlast\n") == done.stdout.count("printed by C") == 4
    assert done.stderr.count("ValueError: an error of the child") == 1


def test_only_the_parent_hears_of_finished_windows(tmp_path: Path) -> None:
    heard = list[Path]()
    options: dict[str, Any] = {"export": "process", "output_dir": tmp_path, "active": 1}
    with Session(options, on_capture={"hear": lambda folder, _: heard.append(folder)}) as session:
        work()
        session.step()
        # the exporter has finished it, and no step has looked for that
        until(lambda: [*tmp_path.glob("steps*")] and session._loop.run.finisher.has_news)

        def leaves_it() -> bool:
            with session.phase("validation"):
                work()
            session.wait(60)
            return not heard and not session.exporting

        assert in_child(leaves_it)
    assert [each.name for each in heard] == ["steps_000000-000000_rank0"]


def test_a_child_that_was_forked_after_a_capture_was_read_does_not_hang(tmp_path: Path) -> None:
    """polars would: its threads are only in the parent."""
    write_trace(tmp_path, [span("aten::mm", 0, 10)])
    code = """
    import os, signal
    from instrument import Capture

    assert len(Capture.load("trace.json").operators) == 1
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            Capture.load("trace.json").operators
        except Exception as error:
            print(error, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(len(Capture.load("trace.json").operators))
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, count = done.stdout.splitlines()
    assert said.startswith("trace.json cannot be read here: this process was forked after")
    assert count == "1"
