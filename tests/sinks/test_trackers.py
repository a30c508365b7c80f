"""Windows in Weights & Biases and MLflow: the real libraries, offline; reads their files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import warm
from builders import steps
from collected import Log, problems_in
from installed import need
from loguru import logger
from waits import until

from instrument import Session
from instrument.base.errors import CaptureError
from instrument.export.sinks import tracker
from instrument.export.sinks.tracker import Sent, Tracker
from instrument.export.sinks.window_scalars import scalars
from instrument.read.capture import Capture
from instrument.record import finisher

pytestmark = pytest.mark.usefixtures("warm_exporters")

Write = Callable[..., Capture]
FIRST, SECOND = "steps_000002-000003_rank0", "steps_000006-000007_rank0"
TRAIN = """
import json, os, sys, time
from pathlib import Path
import torch
from builders import steps, write_capture
from instrument import Session, profiled

HERE = Path(sys.argv[1])
os.chdir(HERE)


def train(sink, log=lambda number: None, **options):
    \"\"\"Steps 2-3 and 6-7 are recorded; waits for each window: the program logs in between.\"\"\"
    sent = []
    config = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    config["output_dir"] = str(HERE / options.pop("folder"))
    with Session(config, sinks={"table": {"rows": 3}, sink: options}) as session:
        tracker = session.config.sinks[sink]
        vars(tracker)["send"] = lambda each, send=tracker.send: (send(each), sent.append(each))
        for number in session.steps(range(8)):
            with profiled("forward (é)"):
                torch.ones(8).sum()
            log(number)
            while number == 5 and not sent:
                time.sleep(0.01)
"""
WANDB = """
import wandb

run = wandb.init(mode="offline", project="mine")
train("wandb", lambda number: run.log({"loss": number * 1.5}, step=number), folder="live")
assert wandb.run is run
run.log({"after": 1.0}, step=8)  # the program's own step goes on
run.finish()
train("wandb", mode="offline", project="own", name="profiles", artifact="tables", folder="own")
assert wandb.run is None
other = write_capture(HERE / "ranks", steps(), rank=1)
from instrument.export.sinks.wandb import WandB

lonely = WandB(mode="offline")
lonely.write(other, other.folder)
lonely.close()
with wandb.init(mode="offline", project="ranks") as run:
    theirs = WandB(artifact="none")
    theirs.notice()
    theirs.write(other, other.folder)
    theirs.close()

from instrument.cli.command import main

alone = write_capture(HERE / "alone", steps())
assert main(["export", str(alone.folder), "--sink", "wandb", "mode=offline", "project=later"]) == 0
"""
MLFLOW = """
import mlflow

uri = f"file://{HERE}/mlflow"
mlflow.set_tracking_uri(uri)
with mlflow.start_run(run_name="live") as run:
    log = lambda number: mlflow.log_metric("loss", number * 1.5, step=number)
    train("mlflow", log, folder="live")
    assert mlflow.active_run().info.run_id == run.info.run_id
    mlflow.log_metric("after", 1.0, step=8)
own = {"tracking_uri": uri, "experiment": "own", "name": "profiles", "artifact": "tables"}
train("mlflow", **own, folder="own")
other = write_capture(HERE / "ranks", steps(), rank=1)
from instrument.export.sinks.mlflow import MLflow

lonely = MLflow()
lonely.write(other, other.folder)
lonely.close()
with mlflow.start_run(run_name="ranks") as run:
    os.environ["MLFLOW_RUN_ID"] = run.info.run_id  # as a launcher hands it to its ranks
    theirs = MLflow(artifact="none")
    theirs.write(other, other.folder)
    theirs.close()

client, found = mlflow.MlflowClient(), {}
for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id]):
        id = run.info.run_id
        histories = {
            name: [(point.step, point.value) for point in client.get_metric_history(id, name)]
            for name in run.data.metrics
        }
        files = {
            folder.path: [file.path for file in client.list_artifacts(id, folder.path)]
            for folder in client.list_artifacts(id, "profile")
        }
        found[run.info.run_name] = [experiment.name, run.info.status, histories, files]
print(json.dumps(found))
"""


def story(tmp_path: Path, code: str) -> str:
    """The output of a program that runs in its own folder, without any account."""
    quiet = {
        "WANDB_SILENT": "true",
        "HOME": str(tmp_path),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",  # to make a database takes seconds
        "DO_NOT_TRACK": "1",
    }
    paths = os.pathsep.join(
        [*map(str, Path(__file__).parents[1:3]), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, **quiet, "PYTHONPATH": paths}
    done = warm.Script(["-c", TRAIN + code, str(tmp_path)], tmp_path, environment)
    stdout, stderr = done.communicate()
    assert done.returncode == 0, stderr
    assert not problems_in(stderr), stderr
    return stdout


def expected(folder: Path, name: str) -> dict[str, float]:
    """The expected scalars of a capture: those of TensorBoard, whose values are tested there."""
    found = {f"profile/{tag}": value for tag, value in scalars(Capture.load(folder / name))}
    assert found["profile/window/steps"] == 2
    assert found["profile/ranges/forward (é)/calls"] == 2
    return found


def records(file: Path) -> Iterator[Any]:
    """The records of wandb's file: LevelDB's log format, blocks of 32 KiB, a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or the last part
            yield Record.FromString(whole)
            whole = b""


def wandb_run(folder: Path, project: str) -> tuple[list[dict[str, Any]], dict[str, set[str]], Any]:
    """The rows of an offline run's history, its artifacts' files by alias, and the run's record."""
    for file in folder.glob("wandb/offline-run-*/*.wandb"):
        rows, artifacts, run = [], {}, None
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run" and run is None:
                run = record.run
            elif kind == "history":
                items = record.history.item
                rows.append(
                    {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
            elif kind == "artifact" or (
                kind == "request" and record.request.HasField("log_artifact")
            ):
                artifact = (
                    record.artifact if kind == "artifact" else record.request.log_artifact.artifact
                )
                assert (artifact.type, artifact.name) == ("profile", f"profile-{run.run_id}")
                (name,) = set(artifact.aliases) - {"latest"}
                artifacts[name] = {entry.path for entry in artifact.manifest.contents}
        if run is not None and run.project == project:
            return rows, artifacts, run
    raise AssertionError(f"no run of the project {project}")


def profiled_rows(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """The scalars of each window by its step on the axis of its own."""
    found = [
        {tag: value for tag, value in row.items() if tag.startswith("profile/")} for row in rows
    ]
    return {row.pop("profile/step"): row for row in found if row}


def test_wandb(tmp_path: Path) -> None:
    need("wandb")
    story(tmp_path, WANDB)

    rows, artifacts, run = wandb_run(tmp_path, "mine")
    assert profiled_rows(rows) == {
        3: expected(tmp_path / "live", FIRST),
        7: expected(tmp_path / "live", SECOND),
    }
    assert [row["loss"] for row in rows if "loss" in row] == [number * 1.5 for number in range(8)]
    assert [row["_step"] for row in rows if "after" in row] == [8], (
        "the program's step is not ours to move"
    )
    assert artifacts == {
        name: {"capture.json", "summary.json", "table.txt", "trace.json.gz"}
        for name in (FIRST, SECOND)
    }

    rows, artifacts, run = wandb_run(tmp_path, "own")
    assert profiled_rows(rows) == {
        3: expected(tmp_path / "own", FIRST),
        7: expected(tmp_path / "own", SECOND),
    }
    assert artifacts == {
        name: {"capture.json", "summary.json", "table.txt"} for name in (FIRST, SECOND)
    }
    assert run.display_name == "profiles"

    rows, artifacts, run = wandb_run(tmp_path, "ranks")
    (row,) = rows
    assert row["profile/rank1/ranges/forward/cpu_ms"] == 0.6
    assert artifacts == {}
    rows, artifacts, run = wandb_run(tmp_path, "later")
    assert profiled_rows(rows)[4]["profile/ranges/forward/cpu_ms"] == 0.6
    assert artifacts == {"steps_3-4": {"capture.json", "trace.json.gz"}}
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 4, "another rank begins no run"


def test_mlflow(tmp_path: Path) -> None:
    need("mlflow")
    found = json.loads(story(tmp_path, MLFLOW).splitlines()[-1])
    assert sorted(found) == ["live", "profiles", "ranks"], "another rank begins no run"
    for run, folder, files in (
        ("live", "live", ["capture.json", "summary.json", "table.txt", "trace.json.gz"]),
        ("profiles", "own", ["capture.json", "summary.json", "table.txt"]),
    ):
        _, status, metrics, attached = found[run]
        assert status == "FINISHED"
        assert attached == {
            f"profile/{name}": [f"profile/{name}/{file}" for file in files]
            for name in (FIRST, SECOND)
        }
        for name, step in ((FIRST, 3), (SECOND, 7)):
            for tag, value in expected(tmp_path / folder, name).items():
                assert [step, value] in metrics[tag.replace("(é)", "_é_")], tag
    assert found["profiles"][0] == "own"
    assert found["live"][2]["loss"] == [[number, number * 1.5] for number in range(8)]
    assert found["live"][2]["after"] == [[8, 1.0]]
    assert found["ranks"][2]["profile/rank1/ranges/forward/cpu_ms"] == [[4, 0.6]]
    assert found["ranks"][3] == {}


class Remembers(Tracker):
    """A tracker that keeps what it is sent, once `free` is set."""

    fails_on: int = -1

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._free, self._got, self._read = Event(), list[Sent](), list[bool]()
        self._free.set()

    def send(self, sent: Sent) -> None:
        self._free.wait()
        if sent.step == self.fails_on:
            raise ConnectionError("nobody\nanswers")
        self._got.append(sent)
        self._read.append(bool(sent.files) and all(file.exists() for file in sent.files))


def record(tmp_path: Path, sink: Tracker, **options: Any) -> Session:
    config = {
        "active": 1,
        "repeat": 2,
        "output_dir": str(tmp_path / "profile"),
        "sinks": {"tracker": sink},
    }
    with Session(config, **options) as session:
        for _ in session.steps(range(3)):
            pass
    return session


def test_a_tracker_that_hangs_holds_up_nothing(tmp_path: Path, log: Log) -> None:
    sink = Remembers(timeout_s=0.01)
    sink._free.clear()
    session = record(tmp_path, sink)
    assert [capture.name for capture in session.captures] == [
        "steps_000000-000000_rank0",
        "steps_000001-000001_rank0",
    ]
    (said,) = log.at("ERROR")
    start = (
        "in close(): The Remembers sink is still sending after 0.01 s (profiler.sinks.Remembers."
        "timeout_s is 0.01): "
    )
    assert start in said
    names = [capture.folder for capture in session.captures]
    for name in names:
        command = (
            f"`instrument export {name} --sink {Remembers.__module__}.Remembers` "
            "sends this window later"
        )
        assert command in said
    sink._free.set()


def test_it_is_said_what_the_end_waits_for(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "_SILENT_S", 0.01)
    sink = Remembers()
    sink._free.clear()
    handler = logger.add(
        lambda message: sink._free.set() if "still has to send" in message else None, level="INFO"
    )
    record(tmp_path, sink)
    logger.remove(handler)
    (said,) = [line for line in log.at("INFO") if "still has to send" in line]
    assert said == (
        "The Remembers sink still has to send steps_000000-000000_rank0, "
        "steps_000001-000001_rank0. The run waits for this, at most 60 s in all."
    )
    assert [sent.step for sent in sink._got] == [0, 1]


def test_no_capture_is_removed_before_a_tracker_has_it(tmp_path: Path) -> None:
    last = "steps_000002-000002_rank0"

    class FarBehind(Remembers):
        def write(self, capture: Capture, folder: Path) -> None:
            until((tmp_path / last).exists)
            super().write(capture, folder)

    sink = FarBehind()
    sink._free.clear()
    config = {
        "active": 1,
        "repeat": 3,
        "keep": 1,
        "output_dir": str(tmp_path),
        "sinks": {"tracker": sink},
    }
    with Session(config) as session:
        for _ in session.steps(range(3)):
            pass
        until(lambda: len(session.captures) == 3)  # though one is to be kept
        sink._free.set()
    assert [sent.step for sent in sink._got] == [0, 1, 2]
    assert all(sink._read), "its files were there"
    assert [capture.name for capture in session.captures] == [last]


def test_where_training_fails_a_tracker_is_not_waited_for(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.expect("exception ValueError")
    monkeypatch.setattr(finisher, "_CLOSING_HERE_S", 0.01)
    sink = Remembers(timeout_s=10_000)
    sink._free.clear()
    with (
        pytest.raises(ValueError, match="training"),
        Session(active=1, output_dir=tmp_path, sinks={"t": sink}),
    ):
        raise ValueError("training")
    assert (
        "is still sending after 0.01 s (profiler.sinks.Remembers.timeout_s is 10000)"
        in log.at("ERROR")[0]
    )
    sink._free.set()


def test_a_tracker_that_fails_is_told_and_gets_the_next_window(tmp_path: Path, log: Log) -> None:
    sink = Remembers(fails_on=0)
    record(tmp_path, sink)
    assert [sent.step for sent in sink._got] == [1]
    (said,) = log.at("ERROR")
    # with the window after it, or at the end where its thread was late
    assert said.startswith(
        (
            "The tracker sink failed on steps_000001-000001_rank0: this window is queued, but "
            "an earlier window could not be sent: steps_000000-000000_rank0 (ConnectionError: nobody answers). The trace is "
            "kept in ",
            "The tracker sink failed in close(): The Remembers sink could not send "
            "steps_000000-000000_rank0 "
            "(ConnectionError: nobody answers)",
        )
    )


def test_with_inline_export_a_window_is_sent_before_its_folder_is_renamed(tmp_path: Path) -> None:
    sink = Remembers()
    record(tmp_path, sink, export="inline")
    assert [file.name for sent in sink._got for file in sent.files] == [
        "summary.json",
        "trace.json.gz",
        "capture.json",
    ] * 2
    assert sink._thread is None


def test_what_is_known_of_a_window_is_not_read_again(write: Write) -> None:
    capture = write(steps(), scalars={"window/steps": 2})
    capture.trace_path.unlink()
    sink = Remembers()
    sink.write(Capture.load(capture.folder or ""), capture.folder or Path())
    sink.close()
    assert (sink._got[0].values, sink._got[0].step) == ({"profile/window/steps": 2}, 4)


def test_failures_of_the_last_window_come_out_at_the_end(write: Write) -> None:
    sink, capture = Remembers(fails_on=4), write(steps())
    sink.write(capture, capture.folder or Path())
    with pytest.raises(
        CaptureError,
        match=r"^The Remembers sink could not send steps_3-4 \(ConnectionError: nobody",
    ):
        sink.close()
