from __future__ import annotations

import copy
import gzip
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collected import Log
from recording import run_session, window
from torch import nn

from instrument import ProfilerConfig, Session, Sink, profiled
from instrument.annotate import backends
from instrument.base.errors import CaptureError, ConfigError
from instrument.read.capture import Capture
from instrument.record import finisher, recorder

pytestmark = pytest.mark.usefixtures("inline_export")

LOADER = [torch.ones(4, 8) * i for i in range(12)]


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def train_step(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with profiled("forward"):
        loss = net(batch).mean()
    loss.backward()
    return loss.detach()


def events(capture: Capture) -> list[dict[str, Any]]:
    with gzip.open(capture.folder / "trace.json.gz") as file:
        return [e for e in json.load(file)["traceEvents"] if e.get("cat") == "user_annotation"]


def whole_steps(capture: Capture) -> list[int]:
    """The numbers of the ProfilerStep ranges that were ended, in the order of their starts."""
    steps = [e for e in events(capture) if e["name"].startswith("ProfilerStep#")]
    finished = [e for e in steps if e["args"].get("finished", True)]
    return [int(e["name"].split("#")[1]) for e in sorted(finished, key=lambda e: e["ts"])]


@pytest.fixture
def train(tmp_path: Path, net: nn.Module) -> Callable[..., Session]:
    """Trains some steps with a session of these options, and returns the session."""
    return lambda steps=12, **options: run_session(
        tmp_path, steps, lambda: train_step(net, LOADER[1]), **options
    )


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: BaseException
) -> None:
    """The first call of the method raises; later ones do what they did."""
    right, errors = getattr(owner, name), [error]

    def method(self: Any, *args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return right(self, *args, **options)

    monkeypatch.setattr(owner, name, method)


class Broken:
    def write(self, capture: Any, folder: Path) -> None:
        raise RuntimeError("a sink of somebody's fails")


class Collects:
    def __init__(self) -> None:
        self.seen: list[Path] = []

    def write(self, capture: Any, folder: Path) -> None:
        assert (folder / "trace.json.gz").exists()
        self.seen.append(folder)


class FiresAfter:
    def __init__(self, number: int) -> None:
        self.number = number
        self.steps: list[Any] = []

    def fires(self, step: Any) -> bool:
        self.steps.append(step)
        return bool(step.number == self.number)


def test_each_window_records_just_its_steps(train: Callable[..., Session], log: Log) -> None:
    session = train(skip_first=1, wait=1, warmup=1, active=2, repeat=2)
    assert [whole_steps(c) for c in session.captures] == [[3, 4], [7, 8]]
    names = ["steps_000003-000004_rank0", "steps_000007-000008_rank0"]
    assert [c.folder.name for c in session.captures] == names
    assert "records steps 3–4, then 7–8 (counted from 0), on cpu" in "".join(log.at("INFO"))
    for capture in session.captures:
        assert capture.metadata["window"]["truncated"] is False
        assert [e["name"] for e in events(capture)].count("forward") == 2


def test_capture_json_says_what_was_recorded(tmp_path: Path, train: Callable[..., Session]) -> None:
    session = train(3, active=2, record_shapes=True)
    about = json.loads((tmp_path / "steps_000000-000001_rank0" / "capture.json").read_text())
    assert about["window"] == {
        "first_step": 0, "last_step": 1, "steps": 2, "planned_steps": 2, "truncated": False,
        "reason": None, "trigger": None, "trigger_reason": None, "phase": "train", "part": None,
        "part_of_step": None,
    }  # fmt: skip
    assert about["config"] == session.config.plain()
    assert about["versions"]["torch"] == torch.__version__
    assert (about["rank"], about["world_size"], about["activities"]) == (0, 1, ["cpu"])


def test_without_a_schedule_the_whole_block_is_recorded(tmp_path: Path, net: nn.Module) -> None:
    with (
        Session(active=None, output_dir=str(tmp_path)) as session,
        profiled("inference"),
        torch.inference_mode(),
    ):
        net(LOADER[0])
    (capture,) = session.captures
    assert whole_steps(capture) == [0]
    assert capture.metadata["window"]["truncated"] is False
    assert "inference" in [e["name"] for e in events(capture)]


def test_a_window_without_end_holds_every_whole_step(train: Callable[..., Session]) -> None:
    (capture,) = train(4, wait=1).captures
    assert whole_steps(capture) == [1, 2, 3]
    assert capture.metadata["window"]["last_step"] == 3
    assert capture.metadata["window"]["truncated"] is False


@pytest.mark.parametrize("config", ["disabled", None])
def test_disabled_does_nothing_at_all(
    tmp_path: Path, net: nn.Module, monkeypatch: pytest.MonkeyPatch, log: Log, config: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with Session(config, model=net) as session:
        assert [float(train_step(net, b)) for b in session.steps(LOADER)]
        with session.phase("validation"):
            session.step()
        assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert session.captures == []
    assert session.step_number == len(LOADER)
    assert list(tmp_path.iterdir()) == []
    assert log == []


def test_short_run_truncates_the_window(tmp_path: Path, net: nn.Module, log: Log) -> None:
    with Session({"wait": 2, "active": 5, "output_dir": str(tmp_path)}) as session:
        for batch in session.steps(LOADER[:4]):
            train_step(net, batch)
    (capture,) = session.captures
    assert whole_steps(capture) == [2, 3]
    about = capture.metadata["window"]
    assert (about["truncated"], about["reason"]) == (True, "the run ended")
    assert (about["steps"], about["planned_steps"]) == (2, 5)
    assert log.at("WARNING") == [
        "The window of steps 2–6 ended early, after 2 of 5 steps (the run ended); it is kept and labelled truncated."
    ]


@pytest.mark.parametrize("steps", [0, 2, 3, 4])
def test_a_run_that_ends_before_its_window_says_so(tmp_path: Path, steps: int, log: Log) -> None:
    assert run_session(tmp_path, steps, wait=3, warmup=1, active=1).captures == []
    (warning,) = log.at("WARNING")
    advice = "call session.step() after each training step, or loop over session.steps(loader)."
    if steps:
        advice = "lower profiler.wait or profiler.warmup, or train longer."
    said = (
        f"The run ended after {steps} steps, before the first window (step 4) had recorded a step"
    )
    assert warning == f"{said}: {advice}"


def test_a_loop_that_never_steps_is_told_so(tmp_path: Path, net: nn.Module, log: Log) -> None:
    with Session({"active": 2, "output_dir": str(tmp_path)}) as session:
        train_step(net, LOADER[0])
    reason = "session.step() was never called"
    assert session.captures[0].metadata["window"]["reason"] == reason
    (said,) = log.at("WARNING")
    assert said.startswith(f"The window of steps 0–1 ended early, after 0 of 2 steps ({reason})")


def test_run_ends_between_windows(train: Callable[..., Session], log: Log) -> None:
    session = train(4, active=2, repeat=0)
    assert [whole_steps(c) for c in session.captures] == [[0, 1], [2, 3]]
    assert log.at("WARNING") == []


def test_a_session_that_was_never_started_says_so_once(log: Log) -> None:
    session = Session(active=1)
    for _ in session.steps(range(3)):
        pass
    session.step()
    assert log.at("WARNING") == [
        "The session was never started, so nothing is recorded: use `with session:`, or session.start()."
    ]


def test_waiting_for_batch_k_belongs_to_step_k(tmp_path: Path, net: nn.Module) -> None:
    with Session({"active": 3, "output_dir": str(tmp_path)}) as session:
        for batch in session.steps(LOADER):
            train_step(net, batch)
    ranges = events(session.captures[0])
    steps = {e["name"]: e for e in ranges if e["name"].startswith("ProfilerStep#")}
    data = sorted((e for e in ranges if e["name"] == "data"), key=lambda e: e["ts"])
    assert len(steps) == len(data) == 3
    for number, waiting in enumerate(data):
        step = steps[f"ProfilerStep#{number}"]
        assert step["ts"] <= waiting["ts"]
        assert waiting["ts"] + waiting["dur"] <= step["ts"] + step["dur"]


def test_a_step_inside_steps_is_not_counted_twice(tmp_path: Path, net: nn.Module, log: Log) -> None:
    with Session({"active": 2, "output_dir": str(tmp_path)}) as session:
        for _ in session.steps(LOADER[:3]):
            session.step()
    assert session.step_number == 3
    assert log.at("WARNING") == [
        "session.step() does nothing inside a loop over session.steps(), which ends each step itself."
    ]


def test_module_ranges_only_in_windows(tmp_path: Path, net: nn.Module) -> None:
    wrapped = []

    def step() -> None:
        wrapped.append(nn.Module.__call__ is not nn.Module._wrapped_call_impl)
        net(LOADER[0])

    session = run_session(tmp_path, 5, step, wait=1, warmup=1, active=1, model=net)
    assert wrapped == [False, False, True, False, False]
    names = [e["name"] for e in events(session.captures[0])]
    assert {"Sequential", "0", "1", "2"} <= set(names)


def test_stop_in_a_warmup(tmp_path: Path, net: nn.Module, log: Log) -> None:
    session = Session({"warmup": 3, "active": 1, "output_dir": str(tmp_path)}, model=net).start()
    session.step()
    session.stop()
    session.stop()
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    (warning,) = log.at("WARNING")
    assert "before the first window (step 3) had recorded a step" in warning
    assert list(tmp_path.iterdir()) == []


def test_second_run_has_its_own_windows(tmp_path: Path, net: nn.Module, log: Log) -> None:
    log.expect("before the first window")
    options = {"skip_first": 50, "active": 1, "warmup": 2, "output_dir": str(tmp_path)}
    session = Session(options, triggers={"mine": FiresAfter(2)})
    for steps in (3, 12):  # the first run ends while the window that the trigger asked for warms up
        with session:
            for batch in session.steps(LOADER[:steps]):
                train_step(net, batch)
        assert session.captures == []
        session.step_number = 4


def test_a_step_number_set_in_mid_run_keeps_the_plan(tmp_path: Path, net: nn.Module) -> None:
    with Session({"wait": 3, "active": 2, "repeat": 3, "output_dir": str(tmp_path)}) as session:
        for number in range(10):
            if number == 2:
                session.step_number = 7  # a checkpoint was loaded: the first window is missed
            train_step(net, LOADER[0])
            session.step()
    assert session.step_number == 15
    assert [whole_steps(c) for c in session.captures] == [[8, 9], [13, 14]]


def test_resumed_run_records_the_same_steps(tmp_path: Path, net: nn.Module) -> None:
    """The second session begins where the first one stopped, as its checkpoint says."""
    names = []
    for first, last in ((0, 6), (6, 13)):
        session = Session(
            {"every_n_steps": 4, "active": 1, "warmup": 1, "output_dir": str(tmp_path)}
        )
        session.step_number = first
        with session:
            for _ in range(first, last):
                train_step(net, LOADER[0])
                session.step()
        names += [whole_steps(c) for c in session.captures]
    assert names == [[4], [8], [12]]


def test_total_steps_too_few_for_the_window(tmp_path: Path, log: Log) -> None:
    options = {"wait": 3, "active": 2, "output_dir": str(tmp_path)}
    sentence = "The run ends with step 2, before the window of steps 3–4: lower profiler.wait, or train longer."
    Session(options, total_steps=3).start().stop()
    assert log.at("WARNING")[0] == sentence
    Session(options, total_steps=300).start(total_steps=3).stop()
    assert log.at("WARNING").count(sentence) == 2
    with Session(options, total_steps=6) as session:
        for _ in range(2):  # two passes over a loader that alone would be too short
            for _ in session.steps(LOADER[:3]):
                pass
    assert len(session.captures) == 1
    assert log.at("WARNING").count(sentence) == 2


@pytest.mark.parametrize(
    ("begin", "total_steps", "said"),
    [
        (
            1200,
            None,
            "The run begins with step 1200, after the last window of the schedule (steps 8–9), so ",
        ),
        (8, 8, "The run begins with step 8, but has 8 steps in all: nothing is left to record."),
        (3, None, None),
    ],
)
def test_a_run_resumed_behind_its_windows_says_so_once(
    tmp_path: Path, log: Log, begin: int, total_steps: int | None, said: str | None
) -> None:
    windows = {"wait": 3, "active": 2, "repeat": 2, "total_steps": total_steps}
    session = Session(windows, output_dir=tmp_path)
    session.step_number = begin
    with session:
        session.step()
        session.step()
    assert [warning[: len(said or "")] for warning in log.at("WARNING")] == ([said] if said else [])


def test_step_number_set_past_the_last_window(tmp_path: Path, log: Log) -> None:
    with Session({"wait": 3, "active": 2, "repeat": 2, "output_dir": tmp_path}) as session:
        session.step_number = 1200
        session.step()
        session.step()
    assert log.at("WARNING") == [
        "Nothing was recorded: the step number went past the last window of the schedule (steps 8–9) before that "
        "window could begin."
    ]


def test_schedule_of_nothing(tmp_path: Path, log: Log) -> None:
    Session({"at_steps": [], "output_dir": tmp_path}).start().stop()
    Session({"at_steps": [], "output_dir": tmp_path}, triggers=["file"]).start().stop()
    Session("timings", output_dir=tmp_path).start().stop()
    assert log.at("WARNING") == [
        "profiler.at_steps is [], and there are neither triggers nor timings: only session.request() records a window."
    ]
    times = "measures the times of ranges and steps in the whole run"
    assert f"Profiler records no window, and {times}, on cpu, into {tmp_path}" in log.at("INFO")


def test_a_session_shows_itself_in_a_line(tmp_path: Path) -> None:
    session = Session(wait=1, active=2, repeat=2, output_dir=tmp_path)
    planned = "<Session: records steps 1–2, then 4–5 (counted from 0); not running, at step 0, 0 captures>"
    assert repr(session) == planned
    with session:
        for _ in range(3):
            session.step()
        assert re.fullmatch(
            r"<Session: records steps 4–5 \(.*\); at step 3, [01] captures?>", repr(session)
        )
        for _ in range(3):
            session.step()
    assert repr(session) == "<Session: records no window; not running, at step 6, 2 captures>"
    assert repr(Session("disabled")) == "<Session: disabled; not running, at step 0, 0 captures>"


def test_triggers_without_a_schedule(tmp_path: Path, log: Log) -> None:
    session = run_session(tmp_path, 8, triggers={"mine": FiresAfter(3)})
    assert [whole_steps(c) for c in session.captures] == [[4]]
    said = f"Profiler records the windows that triggers request, on cpu, into {tmp_path}"
    assert log.at("INFO")[0] == said
    assert log.at("WARNING") == []


def test_failing_sink_stops_nothing_else(train: Callable[..., Session], log: Log) -> None:
    collects = Collects()
    session = train(active=1, repeat=2, sinks={"broken": Broken(), "collects": collects})
    assert session.step_number == 12
    assert [folder.name for folder in collects.seen] == [
        f".{capture.name}.busy" for capture in session.captures
    ]
    assert len(session.captures) == 2
    (error,) = log.at("ERROR")
    sentence = (
        "The broken sink failed on steps_000000-000000_rank0: a sink of somebody's fails. The trace"
    )
    assert error.startswith(sentence)
    assert "Traceback" in error


def test_captures_do_not_keep_what_the_sinks_had_them_read(train: Callable[..., Session]) -> None:
    (capture,) = train(active=1, sinks={"table": {}}).captures
    assert not {"events", "operators", "ranges"} & set(vars(capture))
    assert len(capture.operators) > 5


@pytest.mark.parametrize("part", ["prepare", "start", "next_step", "end_step", "stop", "save"])
def test_what_fails_while_recording_never_reaches_the_loop(
    train: Callable[..., Session],
    net: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    log: Log,
    part: str,
) -> None:
    owner = recorder.RecordedWindow if part == "save" else recorder.Recorder
    fail_once(monkeypatch, owner, part, RuntimeError("torch is not well"))
    session = train(wait=1, warmup=1, active=1, repeat=2, model=net)
    assert session.step_number == 12
    assert [whole_steps(c) for c in session.captures][-1:] == [[5]], "the next window is recorded"
    (error,) = log.at("ERROR")
    assert error.startswith("Recording failed and training goes on: torch is not well")
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_error_without_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise ValueError("no text")

    fail_once(monkeypatch, recorder.RecordedWindow, "save", Mute())
    run_session(tmp_path, 1, active=1)
    assert log.at("ERROR")[0].startswith("Recording failed and training goes on: Mute.")


def test_a_full_disk_costs_one_line_and_the_window(
    tmp_path: Path, net: nn.Module, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    session = Session({"active": 1, "output_dir": str(tmp_path)}).start()
    monkeypatch.setattr(
        "instrument.record.recorder.shutil.disk_usage", lambda _: SimpleNamespace(free=7)
    )
    train_step(net, LOADER[0])
    session.step()
    session.stop()
    assert session.captures == []
    (error,) = log.at("ERROR")
    assert error.startswith("Recording failed and training goes on: Less than 16 MiB are free in ")
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    wanted = tmp_path / "file" / "profile"
    with pytest.raises(ConfigError) as raised:
        Session(active=None, output_dir=str(wanted)).start()
    assert str(raised.value) == (
        f"profiler.output_dir is '{wanted}', which cannot be written (not a directory): choose another folder."
    )
    assert raised.value.__suppress_context__, "the traceback of Python's own error is not shown"


def test_a_second_session_while_one_records_is_refused(tmp_path: Path, net: nn.Module) -> None:
    with Session({"active": 1, "output_dir": str(tmp_path)}) as first:
        with pytest.raises(CaptureError) as raised:
            Session(active=None, output_dir=str(tmp_path)).start()
        train_step(net, LOADER[0])
        first.step()
        # the first one records no more
        Session(active=None, output_dir=str(tmp_path)).start().stop()
    assert str(raised.value) == (
        "Another session is recording in this process, and only one can record at a time: stop "
        "that session first. If a trainer has two callbacks, use one callback with the windows "
        "(profiler.at_steps) and the sinks (profiler.sinks) of both."
    )
    assert len(first.captures) == 1


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda session: pickle.loads(pickle.dumps(session))]
)
def test_a_copy_is_a_session_of_the_same_config_that_never_started(
    copied: Callable[[Session], Session], tmp_path: Path, net: nn.Module
) -> None:
    triggers = {"mine": FiresAfter(1)}
    original = Session(
        active=1, output_dir=tmp_path, sinks={"mine": Collects()}, triggers=triggers, model=net
    )
    with original:
        original.add_metadata("run", "first")
        again = copied(original)
        train_step(net, LOADER[0])
        original.step()
    assert (again.running, again.captures) == (False, [])
    assert again.config.plain() == original.config.plain()
    with again:
        for _ in range(3):
            train_step(again._model, LOADER[0])
            again.step()
    windows = [capture.metadata["window"] for capture in again.captures]
    assert [window["trigger"] for window in windows] == [None, "mine"]
    assert {row.path for row in again.captures[0].ranges} >= {"forward/Sequential"}
    assert again.captures[0].metadata["user_metadata"] == {"run": "first"}
    assert (len(again.config.sinks["mine"].seen), len(original.config.sinks["mine"].seen)) == (2, 1)


def test_the_same_session_cannot_be_started_twice(tmp_path: Path, log: Log) -> None:
    log.expect("before the first window")
    message = "This session is already running: stop it before starting it again"
    options = {"wait": 5, "active": 1, "output_dir": str(tmp_path)}
    with Session(options) as session, pytest.raises(CaptureError, match=message):
        session.start()


@pytest.mark.parametrize("options", [{}, {"experimental_config": {"verbose": True}}])
def test_torch_profiler(tmp_path: Path, net: nn.Module, log: Log, options: dict[str, Any]) -> None:
    with torch.profiler.profile():
        session = Session(at_steps=[1, 4], active=1, output_dir=tmp_path, **options).start()
        for _ in range(3):
            train_step(net, LOADER[0])
            session.step()
    for _ in range(3):
        train_step(net, LOADER[0])
        session.step()
    session.stop()
    assert [whole_steps(c) for c in session.captures] == [[4]]
    assert log.at("WARNING") == [
        "torch's own profiler is running in this process, and only one profiler can run at a time: "
        "no window begins until that profiler has stopped."
    ]
    (error,) = log.at("ERROR")
    assert error.startswith("Recording failed and training goes on: torch's own profiler is")


# mtia is on no machine that these tests run on
@pytest.mark.parametrize("activities", [["cpu", "mtia"], ["mtia"]])
def test_missing_device_is_said(tmp_path: Path, log: Log, activities: list[str]) -> None:
    assert window(tmp_path, activities=activities).metadata["activities"] == ["cpu"]
    assert log.at("WARNING") == [
        "profiler.activities names mtia, which this machine or this torch does not have: only cpu "
        "will be recorded."
    ]


def test_trigger_asks_for_a_window(tmp_path: Path, net: nn.Module, log: Log) -> None:
    trigger = FiresAfter(3)
    options = {"skip_first": 100, "warmup": 1, "active": 2, "output_dir": str(tmp_path)}
    with Session(options, triggers={"mine": trigger}) as session:
        for number, batch in enumerate(LOADER):
            train_step(net, batch)
            session.step(loss=torch.tensor(float(number)))
    assert [whole_steps(c) for c in session.captures] == [[5, 6]]
    assert session.captures[0].metadata["window"]["trigger"] == "mine"
    assert [s.number for s in trigger.steps] == list(range(12))
    assert [s.loss for s in trigger.steps] == [None, *map(float, range(11))], (
        "a loss is seen a step late"
    )
    assert all(s.duration_ns > 0 for s in trigger.steps)
    assert any("The trigger mine fired and records steps 5–6." in line for line in log.at("INFO"))


def test_triggered_window_before_the_schedules(train: Callable[..., Session]) -> None:
    session = train(skip_first=7, active=2, triggers={"mine": FiresAfter(1)})
    assert [whole_steps(c) for c in session.captures] == [[2, 3], [7, 8]]


def test_a_loss_can_be_told_inside_steps(tmp_path: Path) -> None:
    trigger = FiresAfter(99)
    with Session({"active": 1, "output_dir": str(tmp_path)}, triggers={"mine": trigger}) as session:
        for number in session.steps(range(4)):
            if number != 1:
                session.step(loss=float(number))
    assert session.step_number == 4
    assert [s.loss for s in trigger.steps] == [None, 0.0, None, 2.0]


def test_the_session_passes_iterables_and_their_exceptions_on(tmp_path: Path, log: Log) -> None:
    log.expect("exception OSError")

    def loader() -> Any:
        yield 1
        raise OSError("the disk of the data is gone")

    session = Session(active=None, output_dir=str(tmp_path))

    def run() -> None:
        with session:
            assert list(session.steps(range(3))) == [0, 1, 2]
            list(session.steps(loader()))

    with pytest.raises(OSError, match="the disk of the data is gone"):
        run()
    assert session.captures[0].metadata["window"]["reason"] == "exception OSError"


def test_an_iterator_that_is_kept_does_not_silence_later_loops(tmp_path: Path, log: Log) -> None:
    numbers, loader = list[int](), [1, 2, 3]
    with Session(at_steps=[3], active=2, output_dir=tmp_path) as session:
        kept = iter(session.steps(loader))
        assert next(kept) == 1
        for _ in range(2):
            numbers += [session.step_number for _ in session.steps(loader)]
        assert list(kept) == [2, 3]
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert [whole_steps(c) for c in session.captures] == [[3, 4]]


def test_loops_beside_a_kept_iterator(tmp_path: Path, log: Log) -> None:
    log.expect("before the first window")
    with Session(at_steps=[3], active=2, output_dir=tmp_path) as session:
        kept = iter(session.steps(iter([1, 2, 3])))
        assert next(kept) == 1
        for _ in range(2):
            assert list(session.steps([1, 2])) == [1, 2]
    assert "4 batches of session.steps() were no steps, because an iterator" in log.at("WARNING")[0]


def test_a_loop_left_by_break_and_stepped_by_hand_after_that(tmp_path: Path, log: Log) -> None:
    log.expect("before the first window")
    with Session({"wait": 20, "active": 1, "output_dir": str(tmp_path)}) as session:
        for _ in session.steps(range(5)):
            break
        for _ in range(10):
            session.step()
    assert session.step_number == 11


def test_second_session_leaves_the_first_alone(tmp_path: Path, log: Log) -> None:
    first = Session({"wait": 1, "active": 5, "output_dir": str(tmp_path / "a")})
    second = Session({"wait": 3, "active": 1, "output_dir": str(tmp_path / "b")})
    with first, second:
        for _ in range(6):
            with profiled("work"):
                torch.ones(1)
            first.step()
            second.step()
    (row,) = first.captures[-1].ranges.where(name="work")
    assert row.calls == 5
    assert second.captures == []
    assert "Another session is recording in this process" in log.at("ERROR")[0]


def test_an_interrupt_while_torch_stops_leaves_no_profiler_on(
    tmp_path: Path, net: nn.Module, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    log.expect("exception KeyboardInterrupt")
    fail_once(monkeypatch, recorder._KinetoProfile, "stop_trace", KeyboardInterrupt())
    session = Session({"active": 1, "output_dir": str(tmp_path)})

    def run() -> None:
        with session:
            train_step(net, LOADER[0])
            session.step()

    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(session.captures) == 1
    Session(active=None, output_dir=tmp_path).start().stop()


@pytest.mark.parametrize("where", ["stop_trace", "close"])
@pytest.mark.parametrize("first", [KeyboardInterrupt, ValueError])
def test_a_second_interrupt_loses_nothing_and_hides_no_traceback(
    tmp_path: Path,
    net: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    log: Log,
    where: str,
    first: type[BaseException],
) -> None:
    log.expect("is kept and labelled truncated")
    owner = {"stop_trace": recorder._KinetoProfile, "close": finisher.Finisher}[where]
    fail_once(monkeypatch, owner, where, KeyboardInterrupt("second"))
    session = Session({"active": 5, "output_dir": str(tmp_path)})

    def run() -> None:
        with session:
            train_step(net, LOADER[0])
            session.step()
            raise first("first")

    with pytest.raises(KeyboardInterrupt) as raised:
        run()
    if first is KeyboardInterrupt:
        assert (str(raised.value), raised.value.__context__) == ("first", None)
    else:
        assert (str(raised.value), str(raised.value.__context__)) == ("second", "first")
    session.stop()  # as at exit
    assert len(session.captures) == 1


def test_a_forward_that_is_interrupted_leaves_no_range_open(tmp_path: Path) -> None:
    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = nn.Sequential(Interrupted())
    with Session({"active": 2, "output_dir": str(tmp_path)}, model=model) as session:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1))
        session.step()
        with profiled("later"):
            pass
        session.step()
    paths = session.captures[0].ranges.column("path")
    assert paths == ["Sequential", "Sequential/0", "later"]


def test_undescribed_sink_loses_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Sink):
        anything: Any = object()

        def write(self, capture: Any, folder: Path) -> None:
            (folder / "written").touch()

    monkeypatch.setenv("RANK", "")
    capture = window(tmp_path, sinks={"odd": Odd()})
    assert (capture.folder / "written").exists()
    assert capture.metadata["rank"] == 0


def test_failing_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    class NoClock(datetime):
        @classmethod
        def fromtimestamp(cls, *args: Any) -> datetime:
            raise OverflowError("this machine has no time")

    monkeypatch.setattr("instrument.record.step_loop.datetime", NoClock)
    capture = window(tmp_path, profiled("work")(lambda: None))
    assert capture.ranges.column("path") == ["work"]
    assert any("capture.json is incomplete" in line for line in log.at("ERROR"))


def test_the_end_of_a_window_is_no_part_of_a_steps_duration(tmp_path: Path, now: list[int]) -> None:
    class Slow:
        def write(self, capture: Any, folder: Path) -> None:
            now[0] += 10**9

    trigger = FiresAfter(99)
    options = {"active": 1, "output_dir": str(tmp_path), "sinks": {"slow": Slow()}}
    with Session(options, triggers={"mine": trigger}) as session:
        for _ in range(3):
            now[0] += 7
            session.step()
    assert now[0] > 10**9
    assert [step.duration_ns for step in trigger.steps] == [7, 7, 7]


def test_odd_names_come_back_from_the_trace(tmp_path: Path) -> None:
    odd = ['head "a"', "größe θ 中", "tab\there", "a\\b", "line\nbreak", "utf8:plain", "100% of it"]
    with Session({"active": 1, "output_dir": str(tmp_path)}) as session:
        for name in odd:
            with profiled(name):
                torch.ones(1)
            profiled(name)(lambda: None)()
        profiled("{text}")(lambda text: None)("caf\udce9")
        session.step()
    assert [(row.name, row.calls) for row in session.captures[0].ranges] == [
        *((n, 2) for n in odd),
        (r"caf\udce9", 1),
    ]


def test_a_range_that_is_called_like_a_step_is_a_range(tmp_path: Path) -> None:
    with (
        Session(active=None, output_dir=tmp_path) as session,
        profiled("ProfilerStep#3"),
        profiled("inner"),
    ):
        torch.ones(1)
    (capture,) = session.captures
    assert [row.path for row in capture.ranges] == ["'ProfilerStep#3'", "'ProfilerStep#3'/inner"]
    assert capture.steps.column("number") == [0]
    assert [row.calls for row in capture.operators.where(name="ProfilerStep*")] == [1]


@pytest.mark.parametrize(
    ("options", "loads", "warning"),
    [
        ({"at_steps": []}, 0, "only session.request() records a window"),
        ({"wait": 9}, 1, "before the first window"),
    ],
)
def test_where_a_window_is_ahead_the_start_loads_what_torch_needs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    loads: int,
    warning: str,
    log: Log,
) -> None:
    log.expect(warning)
    loaded: list[None] = []
    monkeypatch.setattr("instrument.record.session.import_early", lambda: loaded.append(None))
    with Session(options, output_dir=tmp_path):
        assert len(loaded) == loads


@pytest.mark.nightly
def test_what_torch_loads_for_its_first_window_is_loaded_at_the_start(tmp_path: Path) -> None:
    code = f"""
        import sys
        from instrument import Session
        with Session(at_steps=[], output_dir={str(tmp_path)!r}, export="inline") as idle:
            idle.step()
        assert "torch._inductor" not in sys.modules, "nothing is to be recorded"
        with Session(wait=1, warmup=1, active=1, output_dir={str(tmp_path)!r}, export="inline") as session:
            before = set(sys.modules)
            for _ in range(2):
                session.step()
            print("LOADED", len(set(sys.modules) - before))
            session.step()
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split("LOADED ")[1]) < 10


def test_memory_snapshot_without_cuda(tmp_path: Path, log: Log) -> None:
    options = {"active": 1, "repeat": 2, "memory_snapshot": True, "activities": ["cpu"]}
    session = run_session(tmp_path, 3, **options)
    sentence = "profiler.memory_snapshot does nothing here: it needs CUDA's allocator, and there is no CUDA device."
    assert log.at("WARNING") == [sentence]
    assert [sorted(p.name for p in c.folder.iterdir()) for c in session.captures] == [
        ["capture.json", "summary.json", "trace.json.gz"]
    ] * 2


def test_memory_snapshot_of_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    memory = SimpleNamespace(
        _record_memory_history=lambda **options: done.append(options),
        _snapshot=lambda: done.append("snapshot") or {"segments": [7]},
    )
    monkeypatch.setattr(torch.cuda, "memory", memory)
    window = recorder.Recorder(
        ProfilerConfig(memory_snapshot=True), ["cpu"], backends.backend, tmp_path
    )
    window._takes_snapshot = True  # as where a CUDA device is among the activities
    window.start()
    assert done == [{"max_entries": recorder._SNAPSHOT_EVENTS}]
    recorded = window.stop()
    assert window.stop() is None
    assert done[1:] == ["snapshot", {"enabled": None}]
    recorded.save(tmp_path / "trace.json")
    assert pickle.loads((tmp_path / "memory_snapshot.pickle").read_bytes()) == {"segments": [7]}


def test_a_second_run_into_the_same_folder_gives_its_own_captures(tmp_path: Path) -> None:
    session = Session(active=1, repeat=1, export="inline", output_dir=tmp_path / "profile")
    for number in range(2):
        session.add_metadata("number", number)
        session.step_number = 0
        with session:
            session.step()
        assert session.captures[-1].metadata["user_metadata"]["number"] == number
        shutil.rmtree(tmp_path / "profile")


@pytest.mark.parametrize("all_threads", [False, True])
def test_step_in_a_backward(tmp_path: Path, net: nn.Module, log: Log, all_threads: bool) -> None:
    """At the end of a backward, torch restores the thread's profiler, and would crash in `stop`."""
    if not all_threads:
        log.expect("session.step() was called within a backward")
    options = {"at_steps": [1, 4], "active": 2, "profile_all_threads": all_threads}
    number = 0

    def step_once(_: torch.Tensor) -> None:
        if number == 0:
            session.step()

    next(net.parameters()).register_hook(step_once)
    with Session(options, output_dir=tmp_path) as session:
        for number in range(7):
            train_step(net, LOADER[number])
            if number:
                session.step()
    found = [each.steps.column("number") for each in session.captures]
    assert found == ([[1, 2], [4, 5]] if all_threads else [[4, 5]])
