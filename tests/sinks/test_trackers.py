"""Windows in Weights & Biases and MLflow: the real libraries, offline; reads their files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from threading import Event
from typing import Any, ClassVar

import pytest
import warm
from builders import steps
from collected import Log, problems_in
from installed import need
from loguru import logger
from omegaconf import OmegaConf
from waits import until

import instrument
from instrument import Session
from instrument.base import waiting
from instrument.base.errors import ConfigError
from instrument.base.instantiate import build
from instrument.base.presets import shipped
from instrument.export.sinks.window_scalars import scalars
from instrument.integrations.tracker import Sent, Tracker
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
    with Session(config, sinks={"table": {"rows": 3}}, on_capture={sink: options}) as session:
        tracker = session.config.on_capture[sink]
        vars(tracker)["send"] = lambda each, send=tracker.send: (send(each), sent.append(each))
        for number in session.steps(range(8)):
            with profiled("forward (é)"):
                torch.ones(8).sum()
            log(number)
            while number == 5 and not sent:
                time.sleep(0.01)
                session._loop.run.finisher.deliver()
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
from instrument.integrations.wandb import WandB

lonely = WandB(mode="offline")
lonely.write(other, other.folder)
lonely.close()
with wandb.init(mode="offline", project="ranks") as run:
    theirs = WandB(artifact="none")
    theirs.begin()
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
from instrument.integrations.mlflow import MLflow

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
    del found["profile/cost/export_ms"]  # the time so far, when the sinks without `last` have run
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
        {tag: row[tag] for tag in row if tag.startswith("profile/") and "export_ms" not in tag}
        for row in rows
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
        name: {"capture.json", "scalars.json", "summary.json", "table.txt", "trace.json.gz"}
        for name in (FIRST, SECOND)
    }

    rows, artifacts, run = wandb_run(tmp_path, "own")
    assert profiled_rows(rows) == {
        3: expected(tmp_path / "own", FIRST),
        7: expected(tmp_path / "own", SECOND),
    }
    assert artifacts == {
        name: {"capture.json", "scalars.json", "summary.json", "table.txt"}
        for name in (FIRST, SECOND)
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
    small = ["capture.json", "scalars.json", "summary.json", "table.txt"]
    for run, folder, files in (
        ("live", "live", [*small, "trace.json.gz"]),
        ("profiles", "own", small),
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

    tracker_name: ClassVar[str] = "remembering"

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


def record(tmp_path: Path, tracker: Tracker, **options: Any) -> Session:
    given = {"active": 1, "repeat": 2, "output_dir": tmp_path / "profile", "on_capture": tracker}
    with Session(**given | options) as session:
        for _ in session.steps(range(3)):
            pass
    return session


def test_a_tracker_that_hangs_holds_up_nothing(tmp_path: Path, log: Log) -> None:
    tracker = Remembers(timeout_s=0.01)
    tracker._free.clear()
    session = record(tmp_path, tracker)
    assert [capture.steps.column("number") for capture in session.captures] == [[0], [1]]
    (said,) = log.at("ERROR")
    assert said.startswith("The remembering tracker is still sending after 0.01 s: ")
    for capture in session.captures:
        command = f"`instrument export {capture.folder} --sink {__name__}.Remembers` "
        assert f"{command}sends this capture later" in said
    tracker._free.set()


def test_wait_at_end_is_logged(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_SILENT_S", 0.0)
    tracker = Remembers()
    tracker._free.clear()
    handler = logger.add(
        lambda message: tracker._free.set() if "for the remembering" in message else None,
        level="INFO",
    )
    record(tmp_path, tracker)
    logger.remove(handler)
    said = [line for line in log.at("INFO") if "for the remembering" in line]
    assert said[0] == (
        "Waiting for the remembering tracker, at most 60 s: 2 of 2 windows are left (current: "
        "steps_000000-000000_rank0)"
    )
    assert [sent.step for sent in tracker._got] == [0, 1]


@pytest.mark.parametrize("export", ["inline", "process"])
def test_no_capture_is_removed_before_a_tracker_has_it(tmp_path: Path, export: str) -> None:
    tracker = Remembers()
    tracker._free.clear()
    names = [f"steps_{number:06d}-{number:06d}_rank0" for number in range(3)]
    given = {"active": 1, "repeat": 3, "keep": 1, "output_dir": tmp_path, "export": export}
    with Session(**given, on_capture=tracker) as session:
        for _ in session.steps(range(3)):
            pass
        until(lambda: len(session.captures) == 3)  # though one is to be kept
        tracker._free.set()
    assert [sent.step for sent in tracker._got] == [0, 1, 2]
    assert all(tracker._read), "its files were there"
    assert [capture.name for capture in session.captures] == names[2:]


def test_no_wait_after_failure(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.expect("exception ValueError")
    monkeypatch.setattr(finisher, "_CLOSING_HERE_S", 0.01)
    tracker = Remembers(timeout_s=10_000)
    tracker._free.clear()
    with (
        pytest.raises(ValueError, match="training"),
        Session(active=1, output_dir=tmp_path, on_capture=tracker),
    ):
        raise ValueError("training")
    assert "is still sending after 0.01 s" in log.at("ERROR")[0]
    tracker._free.set()


def test_a_tracker_that_fails_is_told_and_gets_the_next_window(tmp_path: Path, log: Log) -> None:
    tracker = Remembers(fails_on=0)
    session = record(tmp_path, tracker)
    assert [sent.step for sent in tracker._got] == [1]
    (said,) = log.at("ERROR")
    assert said == (
        "The remembering tracker failed (ConnectionError: nobody answers); further failures of it "
        f"are not logged; `instrument export {session.captures[0].folder} --sink "
        f"{__name__}.Remembers` sends this capture later."
    )


def test_a_tracker_gets_the_numbers_that_the_exporter_wrote(tmp_path: Path) -> None:
    """So the training process need not read the trace, and loads no polars."""
    code = f"""
    import sys
    sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
    import torch
    from instrument import Session
    from instrument.integrations.tracker import Tracker

    class Prints(Tracker):
        def send(self, sent):
            print(sent.step, sent.values["profile/window/steps"], len(sent.files), flush=True)

    with Session(active=1, wait=1, output_dir="out", on_capture=Prints()) as session:
        for _ in session.steps(range(3)):
            torch.ones(2).sum()
    print("polars" in sys.modules, "instrument.read.capture" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["1 1 4", "False False"], done.stderr


def test_a_capture_is_sent_by_hand(write: Write) -> None:
    tracker, capture = Remembers(fails_on=3), write(steps())
    tracker.write(capture, capture.folder or Path())
    tracker.close()
    (sent,) = tracker._got
    assert (sent.step, sent.values["profile/window/steps"]) == (4, 2)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_config_file_lists_every_option_of_a_tracker(name: str) -> None:
    need(name)
    text = Path(instrument.__file__).parent / "conf" / "profiler" / "on_capture" / f"{name}.yaml"
    loaded = OmegaConf.to_container(OmegaConf.create(text.read_text()))[name]
    built = build("callback", name, loaded)
    assert loaded == {"_target_": shipped("on_capture")[name], **built.model_dump()}
    with pytest.raises(
        ConfigError, match=f"is one of profiler.on_capture, as in on_capture=.{name}"
    ):
        build("sink", name, {})
