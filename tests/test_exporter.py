"""Windows finished by the worker: the captures, the log messages, and failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import warm
from builders import synchronous_steps
from collected import Log
from own_sinks import Raises
from waits import end_of_run_in_leaps, until

from instrument import Session, Sink
from instrument.base import queue, waiting
from instrument.base.errors import CaptureError, ConfigError
from instrument.base.export_job import from_line, to_line
from instrument.cli.command import main
from instrument.export import window
from instrument.export.sink_calls import build_sinks
from instrument.export.window import finish
from instrument.read.capture import Capture
from instrument.read.ranks.run import Run
from instrument.record import finisher
from instrument.record.config.schema import ProfilerConfig, as_config

pytestmark = pytest.mark.usefixtures("warm_exporters")

SINKS = """
    import os, signal, sys, threading, time
    from pathlib import Path
    from loguru import logger
    from instrument import Sink

    class Notes(Sink):
        word: str = "noted"
        def write(self, capture, folder):
            print("a sink that prints disturbs nothing")
            is_trainer = os.getpid() == capture.metadata["pid"]
            logger.info("{} by {}", self.word, "the trainer" if is_trainer else "another")
            (folder / "note.txt").write_text(f"{self.word} {os.getpid()}")

    class Lines(Sink):
        file: str
        def write(self, capture, folder):
            self._seen = [*getattr(self, "_seen", []), capture.name]
        def close(self, timeout_s):
            Path(self.file).write_text(f"{os.getpid()} {' '.join(self._seen)}")

    class Plain:
        def __init__(self, word="plain"):
            self.word = word
        def write(self, capture, folder):
            (folder / "plain.txt").write_text(f"{self.word} {os.getpid()}")

    class LeavesOn(Sink):
        step: int
        def write(self, capture, folder):
            if capture.metadata["window"]["first_step"] == self.step:
                os._exit(0)

    class DiesOn(Sink):
        step: int
        def write(self, capture, folder):
            is_step = capture.metadata["window"]["first_step"] == self.step
            if is_step:
                os.kill(os.getpid(), signal.SIGKILL)

    class HangsOn(Sink):
        step: int
        def write(self, capture, folder):
            if capture.metadata["window"]["first_step"] == self.step:
                run_out_of_time()

    class Lingers(Sink):
        how: str
        time_runs_out: bool = False
        def write(self, capture, folder):
            if self.how == "thread":
                threading.Thread(target=self._stay).start()
            elif self.how == "write":
                threading.Event().wait()
        def close(self, timeout_s):
            if self.how == "close":
                self._stay()
        def _stay(self):
            if self.how == "thread":
                threading.main_thread().join()
            if self.time_runs_out:
                run_out_of_time()
            else:
                threading.Event().wait()

    def run_out_of_time():
        "The rest of the time that a timer of the exporter allows is over now, if there is one."
        if signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            threading.Event().wait()

    class WaitsFor(Sink):
        file: str
        def write(self, capture, folder):
            while not Path(self.file).exists():
                time.sleep(0.01)
"""


@pytest.fixture
def profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A config with three windows of one step; `their_sinks` can be imported."""
    (tmp_path / "their_sinks.py").write_text(dedent(SINKS))
    monkeypatch.syspath_prepend(tmp_path)
    return {"active": 1, "repeat": 3, "output_dir": str(tmp_path / "profile")}


def run(config: dict[str, Any], steps: int = 3, **options: Any) -> Session:
    with Session(config, **options) as session:
        for _ in range(steps):
            torch.ones(2).sum()
            session.step()
    return session


def names(session: Session) -> list[str]:
    return [capture.name for capture in session.captures]


ALL = [f"steps_{n:06d}-{n:06d}_rank0" for n in range(3)]


@pytest.mark.usefixtures("cold_exporters")
def test_export_process_logs_in_order(profiler: dict[str, Any], log: Log) -> None:
    session = run(
        profiler, sinks={"notes": {"_target_": "their_sinks.Notes", "word": "seen"}, "table": {}}
    )
    assert names(session) == ALL
    for capture in session.captures:
        word, pid = (capture.folder / "note.txt").read_text().split()
        assert word == "seen"
        assert int(pid) != os.getpid()
        table = (capture.folder / "table.txt").read_text()
        assert "Operators" in table
        assert str(capture.folder) in table, "where it lies in the end"
        assert not (capture.folder / "trace.json").exists()
    starts = ("INFO exporter: seen by another", "\nA step takes ")
    said = [start for line in log for start in starts if line.startswith(start)]
    assert said == [*starts] * 3
    recorded = [line for line in log if line.startswith("INFO Recorded ")]
    assert recorded == [f"INFO Recorded {capture.folder}" for capture in session.captures]
    for line, capture in zip((line for line in log if line.startswith("\n")), session.captures):
        assert line.endswith(f"\n\nAll of it: {capture.folder / 'table.txt'}")
    assert [p for p in Path(profiler["output_dir"]).iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("export", ["process", "inline"])
def test_sinks_are_closed_once(profiler: dict[str, Any], tmp_path: Path, export: str) -> None:
    sinks = {"lines": {"_target_": "their_sinks.Lines", "file": str(tmp_path / "lines.txt")}}
    run(profiler, sinks=sinks, export=export)
    pid, *windows = (tmp_path / "lines.txt").read_text().split()
    assert windows == ALL
    assert (int(pid) == os.getpid()) is (export == "inline")


def test_local_sink_class_needs_inline_export(profiler: dict[str, Any]) -> None:
    class Here(Sink):
        def write(self, capture: Capture, folder: Path) -> None:
            seen.append((os.getpid(), folder.name, (folder / "plain.txt").exists()))

    seen: list[Any] = []
    plain = {"_target_": "their_sinks.Plain"}
    sinks = {"chrome_trace": {"keep": False}, "plain": plain, "here": Here()}
    with pytest.raises(ConfigError) as refused:
        Session(profiler, sinks=sinks)
    assert str(refused.value) == (
        f"profiler.sinks.here is a {Here.__qualname__} that the export process cannot build: give a "
        "subclass of instrument.Sink from a module that can be imported, or set "
        "profiler.export=inline, or give a function to call in this process: "
        "on_capture=lambda folder, scalars: …"
    )
    session = run(profiler, sinks=sinks, export="inline")
    assert seen == [(os.getpid(), f".{name}.busy", True) for name in ALL]
    # the last sink is still the last
    assert [capture.trace_path for capture in session.captures] == [None] * 3


def test_instances_and_mappings_both_reach_the_exporter(profiler: dict[str, Any]) -> None:
    from their_sinks import Notes, Plain  # type: ignore[import-not-found]

    plain = {"_target_": "their_sinks.Plain", "word": "mapped"}
    sinks = {"notes": Notes(word="given"), "plain": plain}
    session = run(profiler, steps=1, sinks=sinks)
    (capture,) = session.captures
    assert (capture.folder / "note.txt").read_text().startswith("given ")
    assert (capture.folder / "plain.txt").read_text().startswith("mapped ")
    about = json.loads((capture.folder / "capture.json").read_text())
    assert about["sinks_run"] == ["notes", "plain"]
    with pytest.raises(ConfigError, match="cannot build"):  # it does not tell its options
        Session(profiler, sinks={"own": Plain()})


def test_a_killed_exporter_costs_one_window_its_sinks_and_export_finishes_it_later(
    profiler: dict[str, Any], log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dies = {"_target_": "their_sinks.DiesOn", "step": 1}
    sinks = {"dies": dies, "notes": {"_target_": "their_sinks.Notes"}}
    session = run(profiler, sinks=sinks)
    output = Path(profiler["output_dir"])
    assert names(session) == [ALL[0], ALL[2]]
    (error,) = log.at("ERROR")
    assert error.startswith(
        f"The exporter ended while it worked on {ALL[1]} (SIGKILL). Nothing is lost: training goes on"
    )
    assert queue.left_busy(output) == [output / f".{ALL[1]}.busy"]
    assert log.at("WARNING")[-1].startswith(
        f"These windows are saved but not finished: {ALL[1]}. `instrument export {output}` "
    )

    assert main(["export", str(output)]) == 0
    out = capsys.readouterr().out
    assert f"Finished {output / ALL[1]}.\n" in out
    assert "only the training run knows their options: dies, notes. " in out
    assert (output / ALL[1] / "table.txt").exists()
    assert Capture.load(output / ALL[1]).metadata["window"]["first_step"] == 1
    assert main(["export", str(output)]) == 0
    assert capsys.readouterr().out.startswith(f"No capture in {output} waits for export; ")
    assert main(["export", str(output / "nowhere")]) == 2


@pytest.mark.usefixtures("cold_exporters")
def test_sink_that_exits_the_exporter(profiler: dict[str, Any], log: Log) -> None:
    log.expect("saved but not finished")
    sinks = {"leaves": {"_target_": "their_sinks.LeavesOn", "step": 2}}
    session = run(profiler, sinks=sinks)
    assert names(session) == ALL[:2]
    (error,) = log.at("ERROR")
    assert error.startswith(f"The exporter ended while it worked on {ALL[2]} (exit status 0). ")
    busy = Path(profiler["output_dir"]) / f".{ALL[2]}.busy"
    assert queue.why(busy) == "The exporter ended while it worked on it (exit status 0)."


def test_hanging_exporter_is_replaced(profiler: dict[str, Any], log: Log) -> None:
    log.expect("saved but not finished")
    sinks = {"hangs": {"_target_": "their_sinks.HangsOn", "step": 0}}
    with Session(profiler, sinks=sinks, export_timeout_s=100_000) as session:
        session.step()
        worker_of(session).wait()
        session.step()
        session.step()
    assert names(session) == ALL[1:]
    assert log.at("ERROR")[0].startswith(
        f"The exporter ended while it worked on {ALL[0]} (it took longer than "
        "profiler.export_timeout_s=100000). "
    )


@pytest.mark.usefixtures("cold_exporters")
@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python"])
def test_an_exporter_that_cannot_begin_is_said_once_and_loses_nothing(
    profiler: dict[str, Any], log: Log, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    start, started = finisher.Finisher._start, []

    def counted(self: finisher.Finisher) -> None:
        started.append(None)
        start(self)

    monkeypatch.setattr(finisher.Finisher, "_start", counted)
    with Session(profiler | {"wait": 1}) as session:
        for _ in range(6):
            session.step()
            if (worker := worker_of(session)) is not None:
                worker.wait()
    assert session.captures == []
    (error,) = log.at("ERROR")
    if python != "/bin/false":
        assert error == (
            f"The exporter cannot be started ([Errno 2] No such file or directory: '{python}'): "
            f"`instrument export {profiler['output_dir']}` finishes the captures."
        )
    assert len(started) <= 3 + 2, "one for each window, and two at the end"
    recorded = [f"steps_{number:06d}-{number:06d}_rank0" for number in (1, 3, 5)]
    assert log.at("WARNING")[-1].startswith(
        f"These windows are saved but not finished: {', '.join(recorded)}. "
    )
    assert main(["export", profiler["output_dir"]]) == 0
    assert sorted(p.name for p in Path(profiler["output_dir"]).iterdir()) == recorded


@pytest.mark.usefixtures("cold_exporters")
def test_what_no_exporter_finishes_after_the_end_is_not_waited_for(
    profiler: dict[str, Any], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.expect("The exporter ended before", "saved but not finished")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Session("on_demand", output_dir=profiler["output_dir"], sinks={}) as session:
        window = session.request(steps=1)
        for _ in range(4):
            session.step()
    assert session.saved == 1
    assert not session.exporting
    assert window.wait(60) == "failed"
    with pytest.raises(CaptureError, match="it is failed"):
        assert window.capture


def test_stop_says_what_it_waits_for_and_gives_up_in_time(
    profiler: dict[str, Any], log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    sinks = {"waits": {"_target_": "their_sinks.WaitsFor", "file": str(gate)}}
    session = Session(profiler, sinks=sinks, export_timeout_s=100_000).start()
    session.step()
    session.step()
    end_of_run_in_leaps(monkeypatch, 30_000)
    session.stop()
    assert session.captures == []
    assert log.at("INFO")[-1] == (
        f"Waiting for the exporter, at most 70000 s: 2 of 2 windows are left (current: {ALL[0]})"
    )
    (warning,) = log.at("WARNING")
    assert warning.startswith(
        "The exporter continues by itself, and these windows are not finished yet: "
        f"{ALL[0]}, {ALL[1]}. "
    )
    gate.touch()
    worker_of(session).wait()
    assert names(session) == ALL[:2]


def test_wait_has_a_timeout(profiler: dict[str, Any], log: Log, tmp_path: Path) -> None:
    log.expect("continues by itself")
    gate = tmp_path / "gate"
    sinks = {"waits": {"_target_": "their_sinks.WaitsFor", "file": str(gate)}}
    session = Session(profiler, sinks=sinks, export_timeout_s=60).start()
    session.step()
    session.stop(wait=False)
    session.wait(0.1)
    assert worker_of(session).poll() is None, "it goes on by itself"
    gate.touch()
    session.wait()
    assert names(session) == ALL[:1]


def test_one_process_finishes(profiler: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    output, take = Path(profiler["output_dir"]), queue.take
    folder = queue.queue(queue.stage(output, "w"), {"config": {"sinks": {}}})
    (folder / "trace.json").write_text('{"traceEvents": []}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window.queue, "take", lambda given: (take(given), take(given))[1])
        assert main(["export", str(output)]) == 2
    assert "Another process is finishing " in capsys.readouterr().err
    assert main(["export", str(output)]) == 0, "the other process has died"


def test_a_name_that_is_taken_or_on_its_way_is_not_taken_again(tmp_path: Path, log: Log) -> None:
    log.expect("summary.json")
    first = queue.stage(tmp_path, "w")
    second = queue.stage(tmp_path, "w")
    queued = queue.queue(first, {})
    assert [file.name for file in queued.iterdir()] == ["capture.json"]
    third = queue.stage(tmp_path, "w")
    (queued / "trace.json").write_text("{}")
    assert finish(queued, {}, failed=set()) == tmp_path / "w"
    fourth = queue.stage(tmp_path, "w")
    found = [queue.name_of(folder) for folder in (first, second, third, fourth)]
    assert found == ["w", "w-2", "w-3", "w-4"]
    assert json.loads((tmp_path / "w" / "capture.json").read_text())["name"] == "w"


def test_queued_of_skips_taken_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = queue.queue(queue.stage(tmp_path, "w"), {"run": "a" * 32, "rank": 0})
    monkeypatch.setattr(queue, "queued", lambda _: [tmp_path / ".taken.queued", folder])
    assert queue.queued_of(tmp_path, "a" * 32, 0, os.getuid()) == [folder]


def test_captures_are_those_of_run_and_rank(profiler: dict[str, Any]) -> None:
    session = run(profiler, steps=1)
    (capture,) = session.captures
    about = json.loads((capture.folder / "capture.json").read_text())
    for name, rank in (("x_rank0", 1), ("x_rank0-y_rank0", 0)):
        (capture.folder.parent / name).mkdir()
        (capture.folder.parent / name / "capture.json").write_text(
            json.dumps(about | {"name": name, "rank": rank, "started_at": "2099-01-01T00:00:00"})
        )
    assert sorted(names(session)) == [ALL[0], "x_rank0-y_rank0"], "each once"
    if os.getuid() == 0:
        os.chown(capture.folder.parent / "x_rank0-y_rank0", 12345, -1)
        assert names(session) == ALL[:1]


def test_a_name_that_is_used_again_is_another_capture(profiler: dict[str, Any]) -> None:
    session = run(profiler, steps=1)
    (first,) = session.captures
    assert session.captures == [first], "loaded once"
    about = json.loads((first.folder / "capture.json").read_text())
    about |= {"started_at": "2099-01-01T00:00:00", "user_metadata": {"number": 2}}
    (first.folder / "capture.json").write_text(json.dumps(about))
    (second,) = session.captures
    assert second.metadata["user_metadata"] == {"number": 2}


def test_queued_windows_are_looked_for_as_deep_as_asked(tmp_path: Path) -> None:
    folders = (tmp_path, tmp_path / "run", tmp_path / "run" / "today")
    folders[-1].mkdir(parents=True)
    here, below, deeper = (queue.queue(queue.stage(folder, "w"), {}) for folder in folders)
    assert queue.queued(tmp_path) == [here]
    assert set(queue.queued(tmp_path, depth=2)) == {here, below}
    assert set(queue.queued(tmp_path, depth=3)) == {here, below, deeper}


@pytest.mark.parametrize("taken", [True, False])
def test_publish_name_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    """Any other error of the renaming is the caller's."""
    queued = queue.queue(queue.stage(tmp_path, "w"), {})
    rename, targets = Path.rename, []

    def fails_once(self: Path, target: Path) -> Path:
        targets.append(target.name)
        if len(targets) > 1:
            return rename(self, target)
        if taken:
            target.mkdir()
        raise PermissionError("no")

    monkeypatch.setattr(Path, "rename", fails_once)
    with nullcontext() if taken else pytest.raises(PermissionError):
        assert queue.publish(queued, {"name": "w"}) == tmp_path / "w-2"
    assert targets == ["w", "w-2"][: 1 + taken]


def test_temporary_files_are_removed(tmp_path: Path, log: Log) -> None:
    log.expect("summary.json")
    queued = queue.queue(queue.stage(tmp_path, "w"), {})
    (queued / "trace.json").write_text("{}")
    (queued / ".trace.json.gz.x1.tmp").write_text("half")
    folder = finish(queued, {}, failed=set())
    assert {file.name for file in folder.iterdir()} == {"capture.json", "trace.json.gz"}


class Counts(Sink):
    """Counts the captures that it gets."""

    calls: int = 0

    def write(self, capture: Capture, folder: Path) -> None:
        self.calls += 1


def finished_of(
    folder: Path, rank: int, groups: Any, sink: Sink, about: Any = None, **given: Any
) -> set[str]:
    """The names of the files of a window whose trace has these process groups."""
    about = {"rank": rank, "world_size": 8, "config": {"ranks": "one_per_role"}, **(about or {})}
    queued = queue.queue(queue.stage(folder, f"w{rank}"), about)
    trace: dict[str, Any] = {"traceEvents": synchronous_steps(100)}
    if groups is not None:  # torch writes nothing without a default group
        trace["distributedInfo"] = {"rank": rank, "world_size": 8, "pg_config": groups}
    (queued / "trace.json").write_text(json.dumps(trace))
    return {each.name for each in finish(queued, {"counts": sink}, **given).iterdir()}


WHOLE = {"capture.json", "summary.json", "trace.json.gz"}
REDUCED = WHOLE - {"trace.json.gz"}


def group(description: Any, *ranks: Any) -> dict[str, Any]:
    return {"pg_name": "1", "pg_desc": description, "ranks": [*ranks]}


@pytest.mark.parametrize(
    ("rank", "groups", "kept"),
    [
        (0, [group("mesh_dp", 0, 2), group("mesh_tp", 0, 1)], True),
        (1, [group("mesh_dp", 1, 3), group("mesh_tp", 0, 1)], True),
        (2, [group("mesh_dp", 0, 2), group("mesh_tp", 2, 3)], False),
        (1, [group("mesh_dp_replicate", 1, 5), group("mesh_dp_shard", 0, 1)], False),
        (5, [group("mesh_replicate", 5, 1), group("mesh_shard", 5, 6)], True),
        # one that holds other parallelism too says nothing
        (3, [group("mesh_dp", 3, 7), group("mesh_dp_cp", 2, 3, 6, 7)], True),
        (3, [group("DATA_PARALLEL_GROUP", 3, 7), group("DATA_PARALLEL_GROUP_WITH_CP", 2, 3)], True),
        (7, [group("DATA_PARALLEL_GROUP_GLOO", 3, 7)], False),
        (4, [group("EXPERT_DATA_PARALLEL_GROUP", 0, 4), group("data_parallel", 4, 5)], True),
        (4, [group("default_pg", 0, 4), group("undefined", 0, 4), group("GROUP", 0, 4)], True),
    ],
)
def test_one_per_role_keeps_traces(rank: int, groups: Any, kept: bool, tmp_path: Path) -> None:
    sink = Counts()
    options: dict[str, Any] = {"failed": set(), "one_per_role": True}
    found = finished_of(tmp_path, rank, groups, sink, **options)
    assert (found, sink.calls) == ((WHOLE, 1) if kept else (REDUCED, 0))
    assert Run.load(tmp_path).windows[0].ranks.column("rank") == [rank]


@pytest.mark.parametrize("groups", [[], None, "dp", [group(0, 0, 1)], [group("mesh_dp", "0", 1)]])
def test_one_per_role_without_group_names(groups: Any, tmp_path: Path, log: Log) -> None:
    failed: set[str] = set()
    for rank in (0, 1):
        found = finished_of(tmp_path, rank, groups, Counts(), failed=failed, one_per_role=True)
        assert found == WHOLE
    assert log.at("WARNING") == [
        "profiler.ranks is one_per_role, but no process group is named after data parallelism, so every rank keeps its "
        'trace: name the dimensions, as in init_device_mesh(…, mesh_dim_names=("dp", "tp")), or list the ranks, as in '
        "profiler.ranks=[0, 1]."
    ]


def test_a_trace_without_a_summary_stays(tmp_path: Path, log: Log, monkeypatch: Any) -> None:
    log.expect("summary.json")
    monkeypatch.setattr(window.of_rank, "encoded", lambda _: 1 / 0)
    groups = [group("mesh_dp", 0, 2)]
    found = finished_of(tmp_path, 2, groups, Counts(), failed=set(), one_per_role=True)
    assert found == WHOLE - {"summary.json"}


@pytest.mark.parametrize("fails_in", ["describe", "publish"])
def test_full_disk_loses_no_reduced_window(fails_in: str, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device")

    sink = Counts()
    options: dict[str, Any] = {"failed": set(), "one_per_role": True}
    with monkeypatch.context() as patched:
        patched.setattr(queue, fails_in, full)
        with pytest.raises(OSError, match="No space"):
            finished_of(tmp_path, 2, [group("mesh_dp", 0, 2)], sink, **options)
    [queued] = queue.queued(tmp_path)
    folder = finish(queued, {"counts": sink}, failed=set(), one_per_role=True)
    assert ({each.name for each in folder.iterdir()}, sink.calls) == (REDUCED, 0)
    assert json.loads((folder / "capture.json").read_text())["cost"]["packed_bytes"] > 0


def test_a_capture_json_alone_removes_no_trace(tmp_path: Path) -> None:
    """Anybody may have written it: only the run's own config says so."""
    assert finished_of(tmp_path, 2, [group("mesh_dp", 0, 2)], Counts(), failed=set()) == WHOLE


@pytest.mark.parametrize(
    ("ranks", "world_size", "expected"),
    [("one_per_role", 8, True), ("one_per_role", 1, False), ("all", 8, False)],
)
def test_job_has_one_per_role(ranks: Any, world_size: int, expected: bool, tmp_path: Path) -> None:
    made = finisher.Finisher(ProfilerConfig(ranks=ranks), tmp_path, 0, world_size)
    assert from_line(to_line(made._job)).one_per_role is expected


def test_on_capture_is_called_only_where_the_trace_is_kept(tmp_path: Path) -> None:
    called: list[str] = []
    config = ProfilerConfig(on_capture=lambda folder, scalars: called.append(folder.name))
    made = finisher.Finisher(config, tmp_path, 0, 8)
    for rank in (0, 2):
        options: dict[str, Any] = {"failed": set(), "one_per_role": True, "with_scalars": True}
        groups, run = [group("mesh_dp", 0, 2)], {"run": made.run}
        finished_of(tmp_path, rank, groups, Counts(), about=run, **options)
        made.pending.append(tmp_path / f".w{rank}.queued")
    made.deliver()
    assert called == ["w0"]
    assert made.pending == []


def test_half_a_character_does_not_make_capture_json_unreadable(tmp_path: Path) -> None:
    folder = queue.queue(queue.stage(tmp_path, "w"), {"path": "caf\udce9", "other": "caf\u00e9"})
    about = json.loads((folder / "capture.json").read_text())
    assert (about["path"].encode(), about["other"]) == (rb"caf\udce9", "caf\u00e9")


def test_a_window_without_its_capture_json_is_not_queued(tmp_path: Path) -> None:
    staging = queue.stage(tmp_path, "w")
    (staging / "capture.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        queue.queue(staging, {})
    # neither queued nor written through the link
    assert [path.name for path in tmp_path.iterdir()] == [staging.name]


def test_a_capture_has_its_name_only_when_its_sinks_have_run(tmp_path: Path) -> None:
    found: list[list[str]] = []

    class Looks(Sink):
        def write(self, capture: Capture, folder: Path) -> None:
            found.append([path.name for path in tmp_path.iterdir()])

    queued = queue.queue(queue.stage(tmp_path, "w"), {})
    (queued / "trace.json").write_text('{"traceEvents": []}')
    assert finish(queued, {"first": Looks(), "second": Looks()}, failed=set()) == tmp_path / "w"
    assert found == [[".w.busy"]] * 2


def test_a_job_never_calls_what_is_no_sink(tmp_path: Path, log: Log) -> None:
    evil = {"_target_": "os.mkdir", "path": str(tmp_path / "made")}
    assert build_sinks({"evil": evil}, set()) == {}
    assert not (tmp_path / "made").exists()
    assert "'os.mkdir' is not a sink class" in log.at("ERROR")[0]
    failed: set[str] = set()
    for _ in range(2):  # for each window of a run
        build_sinks({"evil": {"_target_": "os.mkdir"}}, failed)
    assert len(log.at("ERROR")) == 2, "once in a run"


def test_a_plain_sinks_options_survive_a_config_made_of_a_config(profiler: dict[str, Any]) -> None:
    sinks = {"plain": {"_target_": "their_sinks.Plain", "word": "kept"}}
    config = as_config(as_config(profiler, sinks=sinks), active=2)
    assert config.plain()["sinks"] == sinks
    assert (config.sinks["plain"].word, config.sinks_for_exporter) == ("kept", sinks)


def test_callback_that_moves_the_folder(profiler: dict[str, Any], tmp_path: Path) -> None:
    def take(folder: Path, scalars: dict[str, float]) -> None:
        folder.rename(tmp_path / folder.name)

    session = run(profiler, steps=1, on_capture=take)
    assert session.captures == []
    assert (tmp_path / ALL[0] / "trace.json.gz").exists()


def test_path_in_sys_path(profiler: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [Path("/somewhere"), *sys.path])
    assert names(run(profiler, steps=1)) == ALL[:1]


def lingers(profiler: dict[str, Any], how: str, **options: Any) -> dict[str, Any]:
    """The config with one window, and a sink that stays when all is done."""
    sink = {"_target_": "their_sinks.Lingers", "how": how, **options}
    return profiler | {"repeat": 1, "sinks": {"lingers": sink}, "export_timeout_s": 100_000}


@pytest.mark.parametrize("how", ["thread", "close"])
def test_where_every_capture_is_whole_stop_does_not_wait_for_what_a_sink_left(
    profiler: dict[str, Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finisher, "_CLOSING_S", 0.01)
    wait_for, waits = waiting.wait_for, list[Any]()
    monkeypatch.setattr(waiting, "wait_for", lambda *about: (waits.append(about), wait_for(*about)))
    session = Session(lingers(profiler, how)).start()
    session.step()
    session.stop()
    assert names(session) == ALL[:1]
    assert len(waits) == 1
    worker = worker_of(session)
    assert worker.poll() is None, "it goes on by itself"
    worker.kill()
    worker.wait()


@pytest.mark.parametrize("how", ["thread", "close"])
def test_worker_ends_in_its_time(profiler: dict[str, Any], how: str) -> None:
    session = Session(lingers(profiler, how, time_runs_out=True)).start()
    session.step()
    worker = worker_of(session)
    session.stop()
    assert worker.wait() == -signal.SIGALRM


def worker_of(session: Session) -> subprocess.Popen[str] | None:
    return session._loop.run.finisher._process


def test_an_exception_in_training_does_not_wait_for_the_exporter(
    profiler: dict[str, Any], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finisher, "_AFTER_FAILURE_S", 0.05)
    session = Session(lingers(profiler, "write"))
    with pytest.raises(ZeroDivisionError), session:  # noqa: PT012
        session.step()
        1 / 0  # noqa: B018
    assert log.at("WARNING")[-1].startswith(
        f"The exporter continues by itself, and these windows are not finished yet: {ALL[0]}. "
    )
    worker = worker_of(session)
    worker.kill()
    worker.wait()


def test_window_finished_before_it_was_told(profiler: dict[str, Any]) -> None:
    """The worker looks for itself whenever it is told of any window."""
    wake = finisher.Finisher._wake

    def late(self: finisher.Finisher) -> None:
        if self._process is not None and not self._over:
            self._tell("")
            until(lambda: not self.pending[-1].exists())
        wake(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finisher.Finisher, "_wake", late)
        session = run(profiler)
    assert names(session) == ALL


@pytest.mark.parametrize("where", ["process", "inline"])
def test_failing_sink_costs_only_itself(profiler: dict[str, Any], log: Log, where: str) -> None:
    sinks = {what: Raises(what=what) for what in ("keyboard", "exit", "mute")}
    session = run(profiler, sinks=sinks | {"table": {}}, export=where)
    assert names(session) == ALL
    for capture in session.captures:
        assert (capture.folder / "table.txt").exists()
    for error, what in zip(log.at("ERROR"), sinks, strict=True):
        assert f"The {what} sink failed on {ALL[0]}: " in error


@pytest.mark.usefixtures("cold_exporters")
@pytest.mark.parametrize("closed", [0b001, 0b110, 0b111], ids="{:03b}".format)
def test_closed_standard_streams(profiler: dict[str, Any], tmp_path: Path, closed: int) -> None:
    sinks = {"notes": {"_target_": "their_sinks.Notes"}}
    code = f"""
        import os, sys
        from contextlib import suppress
        from loguru import logger
        sys.path.insert(0, {str(tmp_path)!r})
        from instrument import Session
        logger.remove()
        for number, name in enumerate(["stdin", "stdout", "stderr"]):
            if {closed} >> number & 1:
                os.close(number)
                setattr(sys, name, None)
        with Session({profiler!r}, sinks={sinks!r}, timings={{}}) as session:
            for _ in session.steps(range(4)):
                with suppress(OSError):
                    os.write(2, b"as C code prints")
        with open({str(tmp_path / "names")!r}, "w") as file:
            file.write(" ".join(capture.name for capture in session.captures))
    """
    done = warm.run_code(code)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "names").read_text() == " ".join(ALL)
    timings = Path(profiler["output_dir"], "timings_rank0.jsonl")
    assert b"as C code prints" not in timings.read_bytes()


def test_ctrl_c_in_an_inline_sink(tmp_path: Path, log: Log) -> None:
    log.expect("The pressed sink failed")

    class Pressed(Sink):
        def write(self, capture: Capture, folder: Path) -> None:
            signal.raise_signal(signal.SIGINT)

    options = {"sinks": {"pressed": Pressed()}, "export": "inline", "output_dir": tmp_path}
    with pytest.raises(KeyboardInterrupt), Session(active=1, **options) as session:  # noqa: PT012
        session.step()
        pytest.fail("Ctrl-C was swallowed")
    assert names(session) == ALL[:1]


@pytest.mark.parametrize("where", ["process", "inline"])
def test_a_folder_may_have_any_name(tmp_path: Path, where: str, log: Log) -> None:
    log.expect("torch cannot open the path")
    name = 'caf\udce9 café ☃ "quoted" \\\ntwo'
    options = {"metadata": {name: [name]}, "export": where, "execution_trace": True}
    with Session(active=1, output_dir=tmp_path / name, sinks={"table": {}}, **options) as session:
        session.add_metadata("half", f"{name}\ud800")
        session.step()
    (capture,) = session.captures
    assert (capture.folder / "table.txt").exists()
    assert len(Capture.load(capture.folder).steps) == 1
    about = json.loads((capture.folder / "capture.json").read_bytes())
    assert "\ud800" not in str(about), "no reader takes half a character"


def test_arguments_that_are_no_utf8(profiler: dict[str, Any], tmp_path: Path) -> None:
    code = (
        "import torch\nfrom instrument import Session\n"
        f"with Session({profiler!r}, sinks={{'table': {{}}}}) as session:\n    session.step()\n"
    )
    assert warm.run_code(code, os.fsdecode(b"--data=caf\xe9.bin")).returncode == 0
    capture = Capture.load(tmp_path / "profile" / ALL[0])
    assert capture.metadata["command"][1] == r"--data=caf\udce9.bin"
    assert (capture.folder / "table.txt").exists()


@pytest.mark.parametrize("where", ["process", "inline"])
def test_output_dir_is_a_broken_link(tmp_path: Path, log: Log, where: str) -> None:
    scratch, link = tmp_path / "scratch", tmp_path / "link"
    scratch.mkdir()
    link.symlink_to(scratch)
    with Session(active=1, repeat=2, output_dir=link, export=where) as session:
        session.step()
        until(lambda: session.captures)
        shutil.rmtree(scratch)
        session.step()
    if where == "process":
        log.expect("is neither queued nor complete")
    assert session.step_number == 2
    (error,) = log.at("ERROR")
    said = f"The folder {link} is a link to {scratch}, which does not exist, so the window is lost"
    assert said in error


def test_a_queued_window_that_somebody_removed_is_not_waited_for(
    profiler: dict[str, Any], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = queue.queue

    def remove_first(staging: Path, metadata: dict[str, Any]) -> Path:
        folder = original(staging, metadata)
        if queue.name_of(folder) == ALL[0]:
            shutil.rmtree(folder)
        return folder

    monkeypatch.setattr(queue, "queue", remove_first)
    session = run(profiler, export_timeout_s=100_000)
    assert names(session) == ALL[1:]
    assert log.at("WARNING") == [
        f"{ALL[0]} is neither queued nor complete in {profiler['output_dir']}: was it removed?"
    ]


def test_a_folder_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b"
    with Session(active=1, repeat=2, output_dir=output, export="inline") as session:
        session.step()
        shutil.rmtree(tmp_path / "a")
        session.step()
    assert (output / ALL[1] / "capture.json").exists()


def test_unnamed_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(queue, "_write_new", full)
    with pytest.raises(OSError, match="No space left"):
        queue.stage(tmp_path, "w")
    assert list(tmp_path.iterdir()) == []
