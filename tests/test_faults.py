"""Faults around a window, caused in a real training process, and the files left on disk."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import warm
from builders import synchronous_steps
from waits import until

from instrument.base import queue
from instrument.cli.command import main
from instrument.read.capture import Capture

pytestmark = pytest.mark.usefixtures("warm_exporters")

HEAD = """
    import os, signal, sys, time
    from pathlib import Path
    import torch
    from instrument import Session
    out = Path(sys.argv[1])
    # a shell starts background jobs without this handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
    def say(word):
        print(word, flush=True)
    def train():
        torch.ones(8, 8) @ torch.ones(8, 8)
"""
GATE = """
    import time
    from pathlib import Path
    class Gate:
        def __init__(self, folder):
            self.folder = Path(folder)
        def write(self, capture, folder):
            (self.folder / "at the gate").write_text(str(folder))
            while not (self.folder / "open").exists():
                time.sleep(0.01)
"""


class Trainer:
    """A training script in a process of its own."""

    def __init__(self, folder: Path, body: str) -> None:
        (folder / "gate.py").write_text(dedent(GATE))
        script = folder / "train.py"
        script.write_text(dedent(HEAD) + dedent(body))
        self.out = folder / "profile"
        self.process = warm.Script([str(script), str(self.out)], Path.cwd(), os.environ)

    def wait_for(self, word: str) -> None:
        """Wait until it has said a word."""
        for line in self.process.stdout:
            if line.strip() == word:
                return
        raise AssertionError(self.ended())

    def ended(self) -> str:
        """Wait for its end and give what it logged."""
        return self.process.communicate()[1]

    def captures(self) -> list[Capture]:
        """Its captures, once its exporter has finished them."""
        until(lambda: not [*self.out.glob(".*.queued"), *self.out.glob(".*.busy")])
        return self.captures_so_far()

    def on_disk(self) -> list[str]:
        """What lies in its folder, but for the lock that says whether it is alive."""
        return sorted(path.name for path in self.out.iterdir() if not path.name.startswith(".run-"))

    def captures_so_far(self) -> list[Capture]:
        return [
            Capture.load(folder)
            for folder in sorted(self.out.iterdir())
            if not folder.name.startswith(".")
        ]


def reason(capture: Capture) -> str:
    """Why a capture is truncated; its trace is read as proof that it is whole."""
    with gzip.open(capture.trace_path) as file:
        assert json.load(file)["traceEvents"]
    assert capture.metadata["window"]["truncated"] is True
    return str(capture.metadata["window"]["reason"])


LOOP = """
    with Session(output_dir=str(out), active=1000) as session:
        for step in range(1000):
            train()
            {fault}
            session.step()
"""


@pytest.mark.parametrize(
    ("fault", "status", "why"),
    [
        ("if step == 3: raise ValueError('of the training')", 1, "exception ValueError"),
        (
            "if step == 3: os.kill(os.getpid(), signal.SIGINT)",
            -signal.SIGINT,
            "exception KeyboardInterrupt",
        ),
        ("if step == 3: sys.exit(7)", 7, "exception SystemExit"),
    ],
)
def test_exception_truncates_the_window(tmp_path: Path, fault: str, status: int, why: str) -> None:
    trainer = Trainer(tmp_path, LOOP.format(fault=fault))
    log = trainer.ended()
    assert trainer.process.returncode == status
    (capture,) = trainer.captures()
    assert reason(capture) == why
    assert capture.metadata["window"]["steps"] == 3
    assert "of 1000 steps" in log


@pytest.mark.parametrize(
    ("end", "status", "export"),
    [("", 0, "inline"), ("raise KeyError('nobody catches it')", 1, "process")],
)
def test_exit_without_stop(tmp_path: Path, end: str, status: int, export: str) -> None:
    trainer = Trainer(
        tmp_path,
        f"""
        given = {{"active": 1000, "export": "{export}", "sinks": ["table"]}}
        session = Session(given, output_dir=str(out)).start()
        for _ in range(3):
            train()
            session.step()
        {end}
        """,
    )
    trainer.ended()
    assert trainer.process.returncode == status
    (capture,) = trainer.captures()
    assert reason(capture) == "the interpreter ended"
    assert {"summary.json", "table.txt"} <= {file.name for file in capture.folder.iterdir()}


def test_sigterm_is_held_back_until_the_step_ends(tmp_path: Path) -> None:
    trainer = Trainer(
        tmp_path,
        """
        with Session(output_dir=str(out), active=1000) as session:
            for step in range(1000):
                train()
                if step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                    say("the step goes on")
                session.step()
        """,
    )
    trainer.wait_for("the step goes on")
    log = trainer.ended()
    assert trainer.process.returncode == -signal.SIGTERM
    (capture,) = trainer.captures()
    assert (reason(capture), capture.metadata["window"]["steps"]) == ("SIGTERM", 4)
    assert "SIGTERM arrived: the open window is saved at the end of this step, or in 15 s" in log


def test_sigterm_in_a_long_step_is_held_back_for_half_the_grace_time(tmp_path: Path) -> None:
    trainer = Trainer(
        tmp_path,
        """
        with Session(output_dir=str(out), active=1000, preemption_grace_s=1) as session:
            for step in range(1000):
                train()
                if step == 3:
                    say("a long step")
                    while True:
                        time.sleep(0.1)
                session.step()
        """,
    )
    trainer.wait_for("a long step")
    trainer.process.terminate()
    trainer.ended()
    assert trainer.process.returncode == -signal.SIGTERM
    (capture,) = trainer.captures()
    assert (reason(capture), capture.metadata["window"]["steps"]) == ("SIGTERM", 3)


def test_sigterm_reaches_the_handler_that_was_there_and_training_may_go_on(tmp_path: Path) -> None:
    trainer = Trainer(
        tmp_path,
        """
        def theirs(number, frame):
            say(f"theirs, {session._loop.run.finisher.saved} saved, {frame.f_code.co_name}")
        signal.signal(signal.SIGTERM, theirs)
        before = signal.getsignal(signal.SIGTERM)
        given = {"active": 4, "repeat": 2, "wait": 1}
        with Session(given, output_dir=str(out)) as session:
            for step in range(20):
                train()
                if step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                session.step()
        assert signal.getsignal(signal.SIGTERM) is before
        """,
    )
    trainer.wait_for("theirs, 1 saved, pass_on")
    trainer.ended()
    assert trainer.process.returncode == 0
    cut, whole = trainer.captures()
    assert (reason(cut), cut.metadata["window"]["steps"]) == ("SIGTERM", 2)
    assert whole.metadata["window"]["truncated"] is False


def test_signal_handler_gets_the_interrupted_frame(tmp_path: Path) -> None:
    trainer = Trainer(
        tmp_path,
        """
        def interrupted():
            os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: say(f"in {frame.f_code.co_name}"))
        with Session(output_dir=str(out), wait=1000, active=1) as session:
            interrupted()
        """,
    )
    trainer.wait_for("in interrupted")
    trainer.ended()
    assert trainer.process.returncode == 0


def test_sigterm_outside_windows_is_not_held_back(tmp_path: Path) -> None:
    trainer = Trainer(
        tmp_path,
        """
        with Session(output_dir=str(out), wait=1000, active=1) as session:
            train()
            session.step()
            say("waiting")
            signal.pause()
        """,
    )
    trainer.wait_for("waiting")
    trainer.process.terminate()
    trainer.ended()
    assert trainer.process.returncode == -signal.SIGTERM
    assert list(trainer.out.iterdir()) == []


WITHIN = """
    from torch.profiler.profiler import _KinetoProfile
    original = _KinetoProfile.{method}
    def interrupted(self, *args):
        if "{when}" == "before":
            os.kill(os.getpid(), signal.{name})
        original(self, *args)
        if "{when}" == "after":
            os.kill(os.getpid(), signal.{name})
    _KinetoProfile.{method} = interrupted
    with Session(output_dir=str(out), wait=1, active=2, export="{export}") as session:
        for step in range(1000):
            train()
            session.step()
"""


@pytest.mark.parametrize(
    ("name", "method", "when", "export"),
    [
        ("SIGINT", "stop_trace", "before", "process"),
        ("SIGINT", "stop_trace", "after", "process"),
        ("SIGINT", "export_chrome_trace", "after", "process"),
        ("SIGINT", "stop_trace", "after", "inline"),
        ("SIGTERM", "stop_trace", "after", "process"),
        ("SIGTERM", "export_chrome_trace", "before", "process"),
        ("SIGTERM", "export_chrome_trace", "after", "inline"),
    ],
)
def test_signal_in_stop(tmp_path: Path, name: str, method: str, when: str, export: str) -> None:
    trainer = Trainer(tmp_path, WITHIN.format(name=name, method=method, when=when, export=export))
    log = trainer.ended()
    assert trainer.process.returncode == -signal.Signals[name], log
    if name == "SIGTERM" and export == "inline":  # nobody is left to do it
        assert main(["export", str(trainer.out)]) == 0
    (capture,) = trainer.captures()
    assert (capture.metadata["window"]["truncated"], len(capture.steps)) == (False, 2)


def test_ctrl_c_ends_the_waiting_at_the_end_and_nothing_is_lost(tmp_path: Path) -> None:
    at_once = "from instrument.base import waiting; waiting._SILENT_S = 0"
    trainer = Trainer(tmp_path, GATED.format(then=at_once))
    until((tmp_path / "at the gate").exists)
    assert any("Waiting for the exporter" in line for line in trainer.process.stderr)
    os.killpg(trainer.process.pid, signal.SIGINT)
    assert trainer.process.wait() == -signal.SIGINT
    assert trainer.captures_so_far() == []
    (tmp_path / "open").touch()
    assert len(trainer.captures()) == 1
    assert (
        "The exporter continues by itself, and these windows are not finished yet: "
        "steps_000000-000000_rank0. " in trainer.ended()
    )


def test_a_forked_child_leaves_the_window_to_its_parent(tmp_path: Path) -> None:
    trainer = Trainer(
        tmp_path,
        """
        reading, writing = os.pipe()
        with Session(output_dir=str(out), active=2) as session:
            child = os.fork()
            if child == 0:
                if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                    os._exit(1)
                session.step()
                session.step()
                session.stop()
                os.write(writing, b"stopped")
                signal.pause()
            os.close(writing)
            session.step()
            assert os.read(reading, 7) == b"stopped"
            os.kill(child, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
            train()
            session.step()
        """,
    )
    log = trainer.ended()
    assert trainer.process.returncode == 0, log
    (capture,) = trainer.captures()
    assert (capture.metadata["window"]["truncated"], len(capture.steps)) == (False, 2)


# A process group of its own, as a shell with a terminal gives it to each command.
GATED = """
    os.setpgrp()
    sys.path.insert(0, str(out.parent))
    gate = {{"_target_": "gate.Gate", "folder": str(out.parent)}}
    given = {{"active": 1, "sinks": {{"gate": gate}}}}
    with Session(given, output_dir=str(out)) as session:
        train()
        session.step()
        say("recorded")
        {then}
"""


def test_a_killed_trainer_whose_exporter_lives_loses_nothing(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, GATED.format(then="signal.pause()"))
    trainer.wait_for("recorded")
    until((tmp_path / "at the gate").exists)
    os.killpg(trainer.process.pid, signal.SIGKILL)
    trainer.process.wait()
    assert trainer.on_disk() == [".steps_000000-000000_rank0.busy"]
    (tmp_path / "open").touch()
    (capture,) = trainer.captures()
    assert (capture.name, len(capture.steps)) == ("steps_000000-000000_rank0", 1)
    trainer.ended()


@pytest.mark.usefixtures("cold_exporters")
def test_next_run_names_queued_windows(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, GATED.format(then="signal.pause()"))
    trainer.wait_for("recorded")
    until((tmp_path / "at the gate").exists)
    for process in (*_children_of(trainer.process.pid), trainer.process.pid):
        os.kill(process, signal.SIGKILL)
    trainer.ended()
    assert [queue.name_of(each) for each in queue.left_busy(trainer.out)] == [
        "steps_000000-000000_rank0"
    ]
    (tmp_path / "open").touch()
    following = Trainer(
        tmp_path, "with Session(output_dir=str(out), wait=9, active=1): pass"
    ).ended()
    assert (
        "An earlier run recorded steps_000000-000000_rank0 but has not finished them: "
        "`instrument ex" in following
    )
    assert main(["export", str(trainer.out)]) == 0
    (capture,) = trainer.captures()
    assert len(capture.steps) == 1


KILLS = """
    import itertools, json, os, shutil, signal, sys
    from pathlib import Path
    from instrument.base import queue
    from instrument.base.instantiate import sink_of_class
    from instrument.export.window import finish

    here, every = Path(sys.argv[1]), int(sys.argv[2])
    options = {"table": {}, "report": {}, "chrome_trace": {"gzip": False, "metadata": {"a": 1}}}

    class Counts:
        def write(self, capture, folder):
            (folder / "counts.txt").write_text("written")
            with (here / "runs").open("a") as file:
                file.write("x")

    def work(folder, before=lambda: None):
        child = os.fork()
        if not child:
            sinks = {"counts": Counts()}
            sinks |= {name: sink_of_class(name, given) for name, given in options.items()}
            before()
            finish(folder, sinks, failed=set(), with_scalars=True)
            os._exit(0)
        return os.waitpid(child, 0)[1]

    def kill_at(number):
        lines = itertools.count(1)
        def trace(frame, event, _):
            if not frame.f_code.co_filename.endswith(("window.py", "queue.py", "sink_calls.py")):
                return None
            if event == "line" and next(lines) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        return lambda: sys.settrace(trace)

    def queued():
        shutil.rmtree(here / "run", ignore_errors=True)
        (here / "run").mkdir()
        folder = queue.queue(queue.stage(here / "run", "w"), {"run": "a" * 32})
        shutil.copy(here / "trace.json", folder)
        return folder

    def found(folder):
        texts = {}
        for file in sorted(folder.iterdir()):
            texts[file.name] = file.read_bytes()
            # as JSON, because the trace may have a key twice; without what the export took
            if file.name in ("capture.json", "scalars.json", "trace.json"):
                known = texts[file.name] = json.loads(texts[file.name])
                known.pop("cost/export_ms", None)
                known["cost"] = None
        texts["report.html"] = len(texts["report.html"]) // 1000
        return texts

    assert work(queued()) == 0
    expected = found(here / "run" / "w")
    assert expected["capture.json"]["sinks_run"] == ["counts", "table", "report", "chrome_trace"]
    for number in itertools.count(1, every):
        (here / "runs").write_text("")
        folder = queued()
        status = work(folder, kill_at(number))
        if not status:
            break
        assert status == signal.SIGKILL, status
        for left in queue.left_busy(folder.parent):
            queue.put_back(left)
        for left in queue.queued(folder.parent):
            assert work(left) == 0
        again = found(folder.parent / "w")
        different = [each for each in expected | again if again.get(each) != expected.get(each)]
        assert not different, (number, different)
        assert [each.name for each in folder.parent.iterdir()] == ["w"], number
        assert len((here / "runs").read_text()) <= 2
    print("kills", number // every)
"""


@pytest.mark.parametrize("every", [23, pytest.param(3, marks=pytest.mark.nightly)])
def test_another_exporter_makes_the_same_capture(tmp_path: Path, every: int) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": synchronous_steps(100)}))
    done = warm.run_code(KILLS, str(tmp_path), str(every))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 5


THEIR_SINKS = """
import os
class Appends:
    def write(self, capture, folder):
        with (folder / "runs.txt").open("a") as file:
            file.write("x")
class Dies:
    def write(self, capture, folder):
        os.kill(os.getpid(), 4)
"""


def test_a_sink_that_has_run_is_not_run_again_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "their_sinks.py").write_text(THEIR_SINKS)
    trainer = Trainer(
        tmp_path,
        """
        sys.path.insert(0, str(out.parent))
        sinks = {name: {"_target_": f"their_sinks.{name}"} for name in ("Appends", "Dies")}
        with Session(output_dir=str(out), active=1, sinks=sinks) as session:
            train()
            session.step()
        """,
    )
    log = trainer.ended()
    assert "The exporter ended while it worked on steps_000000-000000_rank0 (SIGILL)." in log
    (busy,) = queue.left_busy(trainer.out)
    assert queue.why(busy) == "The exporter ended while it worked on it (SIGILL)."
    assert main(["export", str(trainer.out)]) == 0
    (capture,) = trainer.captures_so_far()
    assert (capture.folder / "runs.txt").read_text() == "x"
    assert capture.about.sinks_run == ["Appends", "table", "chrome_trace"]


def test_a_trainer_that_has_read_a_table_can_fork_data_loaders(tmp_path: Path) -> None:
    """polars hangs in a forked child that uses it; no worker does."""
    trainer = Trainer(
        tmp_path,
        """
        from torch.utils.data import DataLoader
        signal.alarm(120)
        given = {"active": 1, "wait": 2, "repeat": 3}
        with Session(given, output_dir=str(out), on_capture=lambda *_: say("called")) as session:
            for epoch in range(3):
                loader = DataLoader(
                    torch.ones(6, 8), batch_size=2, num_workers=2, multiprocessing_context="fork"
                )
                for batch in session.steps(loader):
                    batch.sum()
                while not session.captures:
                    time.sleep(0.01)
                assert len(session.captures[0].operators)
        """,
    )
    trainer.wait_for("called")
    log = trainer.ended()
    assert trainer.process.returncode == 0, log
    assert len(trainer.captures()) == 3


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_next_run_removes_half_written_windows(tmp_path: Path) -> None:
    trainer = Trainer(
        tmp_path,
        """
        from torch.profiler.profiler import _KinetoProfile
        def killed(self, path):
            Path(path).write_text('{"traceEvents": [')
            os.kill(os.getpid(), signal.SIGKILL)
        _KinetoProfile.export_chrome_trace = killed
        with Session(output_dir=str(out), active=1) as session:
            session.step()
        """,
    )
    trainer.ended()
    assert trainer.on_disk() == [".steps_000000-000000_rank0.partial"]
    Trainer(tmp_path, "with Session(output_dir=str(out), wait=9, active=1): pass").ended()
    assert list(trainer.out.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


FULL = """
    with Session(output_dir=str(out), active=1, repeat=3) as session:
        train()
        session.step()
        while not session.captures:
            time.sleep(0.01)
        {fault}
        for _ in range({size}):
            train()
        session.step()
        for _ in range({size}):
            train()
        session.step()
        say("training went on")
"""
LEAVES_LITTLE = (
    "(out.parent / 'ballast').write_bytes(b'x' * (os.statvfs(out).f_bavail * 4096 - {leaves}))"
)


def failures(trainer: Trainer) -> list[str]:
    """The errors that it logged, once it has gone on training to its end."""
    trainer.wait_for("training went on")
    log = trainer.ended()
    assert trainer.process.returncode == 0, log
    assert "Traceback" not in log
    return [line for line in log.splitlines() if "| ERROR" in line]


# Too little to begin with, and too little for the whole trace.
@pytest.mark.parametrize(
    ("leaves", "least", "size", "told"),
    [
        (2**20, 16 * 2**20, 1, "Less than 16 MiB are free"),
        (2**18, 2**16, 1000, "torch wrote an incomplete trace"),
    ],
)
def test_full_disk(small_disk: Path, leaves: int, least: int, size: int, told: str) -> None:
    fault = f"from instrument.record import recorder; recorder._LEAST_FREE_BYTES = {least}; "
    fault += LEAVES_LITTLE.format(leaves=leaves)
    trainer = Trainer(small_disk, FULL.format(fault=fault, size=size))
    (error,) = failures(trainer)
    assert told in error
    (capture,) = trainer.captures()
    assert (capture.name, len(capture.steps)) == ("steps_000000-000000_rank0", 1)
    assert [folder.name for folder in trainer.out.iterdir()] == [capture.name]


def test_a_quota_costs_the_window_alone(tmp_path: Path) -> None:
    quota = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))"
    trainer = Trainer(tmp_path, FULL.format(fault=quota, size=1000))
    (error,) = failures(trainer)
    assert "quota" in error
    assert [folder.name for folder in trainer.out.iterdir()] == ["steps_000000-000000_rank0"]


@pytest.mark.parametrize("export", ["inline", "process"])
def test_file_in_place_of_the_output_folder(tmp_path: Path, export: str) -> None:
    replaced = "import shutil; shutil.rmtree(out); out.write_text('')"
    body = FULL.replace("active=1,", f"active=1, export={export!r},")
    trainer = Trainer(tmp_path, body.format(fault=replaced, size=1))
    for number, error in enumerate(failures(trainer), start=1):
        assert f"Not a directory: '{trainer.out}/.steps_00000{number}" in error
    assert number == 2
