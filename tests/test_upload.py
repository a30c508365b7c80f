"""Uploads to a real S3 server on this machine and to folders: what arrives, and what is kept."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import fsspec
import pytest
import s3fs
import torch
from collected import Log
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from moto.server import ThreadedMotoServer
from own_sinks import Posts
from waits import end_of_run_in_leaps, end_of_thread, until

from instrument import Capture, ProfilerConfig, Session
from instrument.base import storage, waiting
from instrument.base.errors import CaptureError, ConfigError, MissingPackage
from instrument.base.redact import public, redact
from instrument.cli import command
from instrument.export import exporter, upload
from instrument.record import finisher

# botocore calls datetime.utcnow, and moto's server is closed by another thread than began it
pytestmark = [
    pytest.mark.usefixtures("warm_exporters"),
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning"),
]

SECRET = "hunter22-of-the-bucket"
ARRIVES = {"capture.json", "summary.json", "trace.json.gz"}
ALL = [f"steps_{number:06d}-{number:06d}_rank0" for number in range(3)]


class Server:
    """An S3 server that can be stopped and started again on the same port; its content stays."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.moto: ThreadedMotoServer | None = None
        self.start()
        self.client = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **KEYS)

    def start(self) -> None:
        self.moto = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.moto.start()

    def stop(self) -> None:
        if self.moto is not None:
            self.moto.stop()
            self.moto = None

    def bucket(self, name: str) -> str:
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}/runs"

    def objects(self, bucket: str) -> dict[str, bytes]:
        keys = [
            about["Key"] for about in self.client.list_objects_v2(Bucket=bucket).get("Contents", [])
        ]
        return {key: self.client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": self.url, "key": "anybody", "secret": SECRET}


KEYS = {"aws_access_key_id": "anybody", "aws_secret_access_key": SECRET}


@pytest.fixture(scope="module")
def running_server() -> Iterator[Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(
    running_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Server]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name.upper(), value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", running_server.url)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(upload, "_PAUSES_S", (0,) * 5)
    s3fs.S3FileSystem.clear_instance_cache()
    yield running_server
    s3fs.S3FileSystem.clear_instance_cache()
    if running_server.moto is None:
        running_server.start()


def record(folder: Path, url: str, windows: int = 1, **options: Any) -> Session:
    given = {"active": 1, "repeat": windows, "upload_to": url, "export": "inline"}
    with Session(**given | options, output_dir=folder) as session:
        for _ in range(windows):
            torch.ones(2).sum()
            session.step()
    return session


def local(folder: Path) -> dict[str, bytes]:
    """What of a capture must arrive."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "upload.json"}


def remote_name(folder: Path | None, name: str = "") -> str:
    """The name at a URL of a capture here, or of the capture `name` of the same run."""
    run = json.loads((folder / "capture.json").read_text())["run"]
    return f"{name or folder.name}-{run[:8]}"


def sent(objects: dict[str, bytes], name: str) -> dict[str, bytes]:
    """The files of a folder in the bucket."""
    prefix = f"runs/{name}/"
    return {
        key.removeprefix(prefix): body for key, body in objects.items() if key.startswith(prefix)
    }


def contents(url: str, options: dict[str, Any]) -> dict[str, bytes]:
    """The files at a URL, by their paths below it."""
    fs, path = storage.filesystem(url, options)
    return {file.removeprefix(f"{path}/"): fs.cat_file(file) for file in fs.find(path)}


@pytest.fixture(params=["s3", "file", "memory"])
def place(
    request: pytest.FixtureRequest, server: Server, tmp_path: Path
) -> tuple[str, dict[str, Any]]:
    """A URL of each kind, with nothing there, and its options."""
    if request.param == "s3":
        name = re.sub("[^a-z0-9]+", "-", request.node.name)[-60:].strip("-")
        return server.bucket(name), server.options
    return f"{request.param}://{tmp_path}/there", {}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_exporter_sends_each_capture_and_readers_find_there_what_lies_here(
    server: Server, tmp_path: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.bucket("by-the-exporter")
    options = {"sinks": {"table": {}}, "upload_options": server.options, "timings": {"every": 1}}
    session = record(tmp_path, url, 2, export="process", **options)
    objects = server.objects("by-the-exporter")
    for capture in session.captures:
        place = f"{url}/{remote_name(capture.folder)}"
        assert sent(objects, remote_name(capture.folder)) == local(capture.folder)
        assert set(local(capture.folder)) == {"table.txt", *ARRIVES}
        assert f"exporter: Sent {capture.name} to {place}" in log.at("INFO")
        there = Capture.load(place)
        assert list(there.operators) == list(capture.operators)
        assert there.metadata == capture.metadata
    assert session.captures[0].metadata["config"]["upload_options"] == {"endpoint_url": server.url}
    everything = [
        *objects.values(),
        *(body for c in session.captures for body in local(c.folder or Path()).values()),
    ]
    assert not any(SECRET.encode() in body for body in everything)
    assert not any(SECRET in line for line in log)
    assert SECRET not in repr(session.config)

    assert command.main(["show", str(session.captures[1].folder), "--ops"]) == 0
    here, _ = capsys.readouterr()
    older, newest = (f"{url}/{remote_name(capture.folder)}" for capture in session.captures)
    for place in (newest, url):  # below a folder the newest
        assert command.main(["show", place, "--ops"]) == 0
        there_too, told = capsys.readouterr()
        assert there_too.splitlines()[2:] == here.splitlines()[2:]
    # of the folder
    assert told == (f"Showing the newest of 2 captures, {newest}; the others are:\n  {older}\n")
    assert command.main(["show", f"{newest}/trace.json.gz", "--ops"]) == 0
    # of the run, and not sent with a capture
    timings = (tmp_path / "timings_rank0.jsonl").read_bytes()
    server.client.put_object(Bucket="by-the-exporter", Key="timings.jsonl", Body=timings)
    assert command.main(["show", "s3://by-the-exporter/timings.jsonl"]) == 0
    assert "ProfilerStep" in capsys.readouterr().out
    assert command.main(["export", url, "--sink", "table", "--to", str(tmp_path / "tables")]) == 0
    folders = [remote_name(capture.folder) for capture in session.captures]
    assert names(tmp_path / "tables") == folders
    assert names(tmp_path / "tables" / folders[0]) == ["table.txt"]


def test_a_server_that_comes_back_gets_what_it_missed_and_only_then_is_it_removed_here(
    server: Server, tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_PAUSES_S", (0.01,) * 100_000)
    url = server.bucket("comes-back")
    server.stop()
    output = tmp_path / "profile"
    given = {"upload_to": url, "upload_options": server.options, "keep": 1, "export": "inline"}
    with Session(active=1, repeat=3, output_dir=str(output), **given) as session:
        for _ in range(3):
            session.step()
        assert [name for name in names(output) if not name.startswith(".")] == ALL, (
            "none has arrived"
        )
        until(lambda: any("is not sent yet (Could not connect" in line for line in log.at("DEBUG")))
        server.start()
    assert names(output) == ALL[2:]
    objects = server.objects("comes-back")
    arrived = [set(sent(objects, remote_name(output / ALL[2], name))) for name in ALL]
    assert arrived == [ARRIVES] * 3
    assert sent(objects, remote_name(output / ALL[2])) == local(output / ALL[2])


def test_a_server_that_is_away_is_said_once_and_export_sends_later(
    server: Server, tmp_path: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.bucket("away")
    server.stop()
    session = record(tmp_path / "profile", url, 3, upload_options=server.options, keep=1)
    output = session.output_dir
    assert [capture.name for capture in session.captures] == names(output) == ALL, (
        "keep=1 removes nothing unsent"
    )
    (error,) = log.at("ERROR")
    assert error.startswith(
        f"{ALL[0]} cannot be sent to {url} (Could not connect to the endpoint URL"
    )
    assert error.endswith(
        "and is kept on disk; later failures are not logged. "
        f"`instrument export {output} --upload-to {url}` sends such captures."
    )
    assert len([line for line in log.at("DEBUG") if "not sent yet" in line]) == 5, (
        "the others have one try each"
    )
    (warning,) = log.at("WARNING")
    assert warning.startswith(
        f"These captures are not sent to {url} yet and are kept on disk: {', '.join(ALL)}. "
        f"`instrument export {output} --upload-to {url}` "
    )

    assert command.main(["export", str(output / ALL[0]), "--upload-to", url]) == 2, (
        "the server is still away"
    )
    sentence = f"1 of 1 captures could not be finished or sent. {ALL[0]}: Could not connect"
    assert sentence in capsys.readouterr().err
    server.start()
    assert command.main(["export", str(tmp_path), "--upload-to", url]) == 0
    assert sorted(capsys.readouterr().out.removeprefix("Sent ").rstrip(".\n").split(", ")) == [
        f"{url}/{remote_name(output / name)}" for name in ALL
    ]
    objects = server.objects("away")
    assert all(sent(objects, remote_name(output / name)) == local(output / name) for name in ALL)
    assert command.main(["export", str(tmp_path), "--upload-to", url]) == 0
    assert capsys.readouterr().out.startswith("No capture in ")


def test_sent_elsewhere_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, above = (f"file://{tmp_path}{name}" for name in ("/first", "/second", ""))
    session = record(tmp_path / "out", first)
    folder = session.captures[0].folder
    name = remote_name(folder)
    for url in (second, second, above):
        assert command.main(["export", str(tmp_path / "out"), "--upload-to", url]) == 0
    assert capsys.readouterr().out == (
        f"Sent {second}/{name}.\n"
        f"No capture in {tmp_path / 'out'} waits for export; to run a sink on captures, add "
        "--sink NAME.\n"
        f"Sent {above}/{name}.\n"
    )
    for there in (tmp_path / "first", tmp_path / "second", tmp_path):
        assert local(there / name) == local(folder)
        assert names(there / name) == sorted(local(folder)), "no upload.json"


def test_a_server_that_dies_in_the_middle_shows_no_capture_and_later_gets_the_rest(
    server: Server, tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.expect("are not sent to", "cannot be sent to")
    url = server.bucket("dies")
    put, calls = upload._put, []

    def put_and_die(fs: Any, folder: Path, path: str, files: list[str]) -> None:
        calls.append(files)
        put(fs, folder, path, files[:1])
        server.stop()
        put(fs, folder, path, files[1:])

    def put_and_note(fs: Any, folder: Path, path: str, files: list[str]) -> None:
        calls.append(files)
        put(fs, folder, path, files)

    with monkeypatch.context() as patch:
        patch.setattr(upload, "_put", put_and_die)
        session = record(
            tmp_path / "profile", url, upload_options=server.options, sinks={"table": {}}
        )
    assert calls == [["summary.json", "table.txt", "trace.json.gz"]]
    folder = session.captures[0].folder
    name = remote_name(folder)
    server.start()
    assert list(server.objects("dies")) == [f"runs/{name}/summary.json"]
    assert not upload.has_arrived(folder, url)
    with pytest.raises(
        CaptureError, match=r"There is no capture at s3://dies/runs/.*: it has no capture\.json"
    ):
        Capture.load(f"{url}/{name}")

    calls.clear()
    monkeypatch.setattr(upload, "_put", put_and_note)
    assert command.main(["export", str(tmp_path), "--upload-to", url]) == 0
    assert calls == [["table.txt", "trace.json.gz"], ["capture.json"]], (
        "only what is missing, capture.json last"
    )
    assert sent(server.objects("dies"), name) == local(folder)
    assert upload.has_arrived(folder, url)


def test_a_hanging_upload_delays_no_window_and_after_a_killed_exporter_another_sends_all(
    server: Server, tmp_path: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.bucket("killed")
    server.stop()
    output = tmp_path / "profile"
    given = {"upload_to": url, "upload_options": server.options, "output_dir": str(output)}
    with Session(active=1, repeat=2, **given) as session:
        finishing = session._loop.run.finisher
        with socket.create_server(("127.0.0.1", server.port)) as deaf:
            session.step()
            asking, _ = deaf.accept()  # and never answer
        session.step()
        until(lambda: len(session.captures) == 2)
        server.start()
        finishing._process.kill()
    asking.close()
    (error,) = log.at("ERROR")
    assert error.startswith(
        f"The exporter ended before it was done with {ALL[0]}, {ALL[1]} (SIGKILL). Nothing is lost: "
    )
    assert log.at("WARNING") == [], "another exporter has sent both"
    objects = server.objects("killed")
    assert len({key.split("/")[1] for key in objects}) == 2
    for name in ALL[:2]:
        assert sent(objects, remote_name(output / name)) == local(output / name)
    assert command.main(["export", str(output), "--upload-to", url]) == 0
    assert capsys.readouterr().out.startswith(f"No capture in {output} waits for export; ")


def test_what_the_exporter_cannot_send_is_named_at_the_end_and_sent_by_hand(
    server: Server, tmp_path: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "s3://made-later/runs"
    output = tmp_path / "profile"
    record(output, url, 2, export="process", upload_options=server.options)
    (error,) = log.at("ERROR")
    assert error.startswith(f"exporter: {ALL[0]} cannot be sent to {url} (")
    assert log.at("WARNING") == [
        f"These captures are not sent to {url} yet and are kept on disk: {ALL[0]}, {ALL[1]}. "
        f"`instrument export {output} --upload-to {url}` sends captures that have not arrived."
    ]
    server.bucket("made-later")
    assert command.main(["export", str(output), "--upload-to", url]) == 0
    places = [f"{url}/{remote_name(output / name)}" for name in ALL[:2]]
    assert sorted(capsys.readouterr().out.removeprefix("Sent ").rstrip(".\n").split(", ")) == places
    for name in ALL[:2]:
        there = sent(server.objects("made-later"), remote_name(output / name))
        assert there == local(output / name)


def test_stop_gives_up_in_time(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, send = threading.Event(), upload.send
    monkeypatch.setattr(upload, "send", lambda *about: (gate.wait(), send(*about))[1])
    url = f"file://{tmp_path}/there"
    end_of_run_in_leaps(monkeypatch, 10_000)
    session = record(tmp_path / "here", url, 2, export_timeout_s=100_000)
    assert (
        f"Waiting for the upload, at most 90000 s: 2 of 2 windows are left (current: {ALL[0]})"
        in log.at("INFO")
    )
    (warning,) = log.at("WARNING")
    assert warning.startswith(
        f"These captures are not sent to {url} yet and are kept on disk: {ALL[0]}, {ALL[1]}. "
    )
    gate.set()
    end_of_thread("instrument upload")
    assert names(tmp_path / "there") == [remote_name(each.folder) for each in session.captures]


class Hanging:
    """A thread that does not end; the clock goes on while somebody waits for it."""

    alive, now = True, 0.0

    def ended(self, timeout_s: float) -> bool:
        self.now += timeout_s if self.alive else 0
        return not self.alive


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Hanging:
    thread = Hanging()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: thread.now))
    return thread


def test_wait_for_counts_returns(monkeypatch: pytest.MonkeyPatch, log: Log, hanging: Any) -> None:
    monkeypatch.setattr(waiting, "_SILENT_S", 0.0)
    monkeypatch.setattr(waiting, "_LOG_EVERY_S", 0.0)
    left = iter([["d"], ["a", "b", "c"], ["b", "c"], []])
    waiting.wait_for(hanging.ended, lambda: next(left), 60, 0, "upload")
    assert log.at("INFO") == [
        "Waiting for the upload, at most 60 s: 1 of 1 windows are left (current: d)",
        "Waiting for the upload, at most 60 s: 3 of 3 windows are left (current: a)",
        "Waiting for the upload, at most 60 s: 2 of 3 windows are left (current: b)",
    ]
    assert list(left) == []


def test_wait_for_logs_each_minute(log: Log, hanging: Any) -> None:
    said = list[float]()

    def left() -> list[str]:
        if len(log) > len(said):
            said.append(hanging.now)
        return ["a"]

    waiting.wait_for(hanging.ended, left, 125, 0, "exporter")
    assert said == pytest.approx([2, 62, 122], abs=0.3)  # heard by the next look


def test_no_wait_is_longer_than_allowed_or_than_the_thread_runs(hanging: Any) -> None:
    for left, allowed_s, closing_s in (
        (lambda: ["a"], 3, 60),
        (list, 3, 60),  # nothing is left, but the thread runs
        (list, 60, 3),
    ):
        hanging.now = 0
        waiting.wait_for(hanging.ended, left, allowed_s, closing_s, "upload")
        assert hanging.now == pytest.approx(3)
    hanging.alive, hanging.now = False, 0
    waiting.wait_for(hanging.ended, lambda: ["a"], 60, 60, "upload")
    assert hanging.now == 0


def test_where_training_fails_uploads_are_not_waited_for(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached, gate, send = threading.Event(), threading.Event(), upload.send
    url, here = f"file://{tmp_path}/there", tmp_path / "here"

    def send_through_the_gate(*about: Any) -> str:
        reached.set()
        gate.wait()
        return send(*about)

    with monkeypatch.context() as patch:
        patch.setattr(upload, "send", send_through_the_gate)
        given = {"output_dir": here, "upload_to": url, "export_timeout_s": 10_000}
        with suppress(ZeroDivisionError), Session(active=1, export="inline", **given) as session:
            session.step()
            assert reached.wait()
            1 / 0  # noqa: B018
    assert log.at("WARNING") == [
        f"These captures are not sent to {url} yet and are kept on disk: {ALL[0]}. `instrument "
        f"export {here} --upload-to {url}` sends captures that have not arrived."
    ]
    assert command.main(["export", str(here), "--upload-to", url]) == 0
    assert capsys.readouterr().out == f"Sent {url}/{remote_name(here / ALL[0])}.\n"
    gate.set()
    session._loop.run.finisher._inline._uploads.close()


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("The specified bucket does not exist"),
        PermissionError("Access Denied"),
        FileExistsError("there is already a capture at memory://there/x"),
        RuntimeError("cannot schedule new futures after interpreter shutdown"),
    ],
)
def test_what_no_further_try_can_help_has_none(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    log.expect("are not sent to")
    tried: list[Any] = []

    def refuse(*about: Any) -> str:
        tried.append(about)
        raise error

    monkeypatch.setattr(upload, "send", refuse)
    record(tmp_path, "memory://there")
    assert len(tried) == 1
    assert log.at("ERROR")[0].startswith(
        f"{ALL[0]} cannot be sent to memory://there ({error}) and is kept"
    )


def test_missing_bucket(server: Server, tmp_path: Path, log: Log) -> None:
    log.expect("are not sent to")
    record(tmp_path, "s3://no-such-bucket/runs", upload_options=server.options)
    assert "The specified bucket does not exist" in log.at("ERROR")[0]
    assert not [line for line in log.at("DEBUG") if "not sent yet" in line]


def test_a_file_that_arrived_short_is_sent_again(
    place: tuple[str, dict[str, Any]], tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.expect("are not sent to")
    url, options = place
    put, calls = upload._put, []
    short = "1 of the capture's files did not arrive completely, such as trace.json.gz"

    def put_short(fs: Any, folder: Path, path: str, files: list[str]) -> None:
        put(fs, folder, path, files)
        if "trace.json.gz" in files:
            fs.pipe_file(f"{path}/trace.json.gz", b"short")

    def put_and_note(fs: Any, folder: Path, path: str, files: list[str]) -> None:
        calls.append(files)
        put(fs, folder, path, files)

    with monkeypatch.context() as patch:
        patch.setattr(upload, "_put", put_short)
        folder = record(tmp_path / "here", url, upload_options=options).captures[0].folder
    assert short in log.at("ERROR")[0]
    assert not upload.has_arrived(folder, url)
    fs, path = storage.filesystem(f"{url}/{remote_name(folder)}", options)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(upload, "_put", lambda *_: None)
            with pytest.raises(CaptureError, match=re.escape(short)):
                upload.send(folder, url, options)
            patch.setattr(upload, "_put", put_and_note)
            assert upload.send(folder, url, options) == f"{url}/{remote_name(folder)}"
        assert upload.has_arrived(folder, url)
        assert contents(f"{url}/{remote_name(folder)}", options) == local(folder)
        fs.pipe_file(f"{path}/trace.json.gz", b"changed at the server")
    assert calls == [["trace.json.gz"], []] * 2, "and nothing else"


def test_runs_whose_captures_have_the_same_name_get_a_folder_each(
    place: tuple[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, options = place
    sessions = [
        record(tmp_path / str(number), f"{url}/", upload_options=options) for number in range(3)
    ]
    captures = [session.captures[0] for session in sessions]
    assert {capture.name for capture in captures} == {ALL[0]}
    assert {file.partition("/")[0] for file in contents(url, options)} == {
        remote_name(capture.folder) for capture in captures
    }
    for capture in captures:
        there = Capture.load(f"{url}/{remote_name(capture.folder)}")
        assert there.metadata == capture.metadata
        assert list(there.operators) == list(capture.operators)
        assert contents(f"{url}/{remote_name(capture.folder)}", options) == local(capture.folder)
    assert command.main(["show", url]) == 0
    assert "newest of 3 captures" in capsys.readouterr().err


@pytest.mark.parametrize("theirs", ["a capture", "a file"])
def test_what_another_has_put_at_the_place_stays_as_it_is(
    place: tuple[str, dict[str, Any]],
    tmp_path: Path,
    theirs: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, options = place
    own = record(tmp_path / "own", url, upload_options=options).captures[0].folder
    there = f"{url}/{remote_name(own)}"
    fs, path = storage.filesystem(there, options)
    if theirs == "a file":
        fs.rm(path, recursive=True)
        fs.makedirs(path, exist_ok=True) if not fs.async_impl else None
        fs.pipe_file(f"{path}/notes.txt", b"by hand")
    before = contents(url, options)
    copy = tmp_path / "copy" / own.name
    shutil.copytree(own, copy)  # with the upload.json, which is the other folder's
    (copy / "trace.json.gz").write_bytes(b"changed")
    (copy / "more.txt").write_text("more")
    for _ in range(2):
        with pytest.raises(FileExistsError, match=f"^there is already a capture at {there}$"):
            upload.send(copy, url, options)
        assert not upload.has_arrived(copy, url)
    assert command.main(["export", str(copy), "--upload-to", url]) == 2
    assert f"there is already a capture at {there}" in capsys.readouterr().err
    assert contents(url, options) == before
    (own / "more.txt").write_text("more")
    upload.send(own, url, options)
    assert contents(there, options).items() >= local(own).items(), "its own folder may go on"


def test_file_system_without_bulk_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(
        self: MemoryFileSystem, lpath: str, rpath: str
    ) -> None:  # as SFTP has it in older fsspec
        self.pipe_file(rpath, Path(lpath).read_bytes())

    monkeypatch.setattr(MemoryFileSystem, "put", put)
    url = f"memory://{tmp_path}"
    folder = record(tmp_path / "here", url).captures[0].folder
    assert contents(f"{url}/{remote_name(folder)}", {}) == local(folder)


@pytest.mark.parametrize(
    ("world_size", "start"), [(1, (0, 0.0)), (8, (0, 0.008)), (10_000, (0, 10.0))]
)
def test_ranks_begin_and_repeat_their_uploads_at_random_moments(
    world_size: int, start: tuple[float, float], tmp_path: Path, monkeypatch: Any, log: Log
) -> None:
    spans, slept = [], []

    def highest(low: float, high: float) -> float:
        spans.append((low, high))
        return high

    def send(*_: Any) -> str:
        slept.append("send")
        raise OSError("busy")

    monkeypatch.setattr(upload, "uniform", highest)
    monkeypatch.setattr(upload, "send", send)
    monkeypatch.setattr(upload, "time", SimpleNamespace(sleep=slept.append))
    uploads = upload.Uploads("memory://there", {}, world_size)
    uploads.add(tmp_path)
    uploads.close()
    log.expect("cannot be sent")
    # one and a half times the average pauses
    pauses = [0.75, 1.5, 3.0, 6.0, 12.0]
    assert slept == [start[1], "send", *(each for pause in pauses for each in (pause, "send"))]
    assert spans == [start, *[(0.5, 1.5)] * 5]


def test_only_the_first_capture_waits(tmp_path: Path, monkeypatch: Any) -> None:
    done = []
    monkeypatch.setattr(upload, "send", lambda folder, *_: done.append(folder.name))
    monkeypatch.setattr(upload, "time", SimpleNamespace(sleep=lambda s: s and done.append("pause")))
    uploads = upload.Uploads("memory://there", {}, 8)
    uploads.add(*(tmp_path / name for name in "abc"))
    uploads.close()
    assert done == ["pause", "a", "b", "c"]


@pytest.mark.parametrize("export", ["inline", "process"])
@pytest.mark.parametrize(("ranks", "expected"), [("all", 5000), ([0, 3], 2)])
def test_uploads_know_how_many_ranks_record(
    export: Any, ranks: Any, expected: int, tmp_path: Path, monkeypatch: Any
) -> None:
    config = ProfilerConfig(upload_to="memory://there", export=export, ranks=ranks)
    sizes = []
    monkeypatch.setattr(exporter, "Uploads", lambda *about: sizes.append(about[-1]))
    made = finisher.Finisher(config, tmp_path, 3, 5000)
    made.begin()
    assert (sizes or [made._job.recording_ranks]) == [expected]


def test_failing_capture_holds_up_no_other(tmp_path: Path, log: Log, monkeypatch: Any) -> None:
    monkeypatch.setattr(upload, "_PAUSES_S", ())
    send, tried = upload.send, []

    def send_or_not(folder: Path, *about: Any) -> str:
        tried.append(folder.name)
        if tried == [ALL[0]]:
            raise OSError(f"{SECRET} was refused")
        return send(folder, *about)

    monkeypatch.setattr(upload, "send", send_or_not)
    options = {"token": SECRET, "keys": [SECRET]}
    session = record(tmp_path / "here", f"file://{tmp_path}/there", 2, upload_options=options)
    assert tried == [*ALL[:2], ALL[0]], "tried again when another had arrived"
    assert names(tmp_path / "there") == [remote_name(each.folder) for each in session.captures]
    assert "(*** was refused)" in log.at("ERROR")[0]
    assert log.at("WARNING") == []
    assert len(session.captures) == 2


REFUSED = " is a URL with a password or a query (the text after `?`). This URL would be"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("to", "/mnt/captures", " is '/mnt/captures', but it must be a URL such as s3://"),
        ("to", f"file://me:{SECRET}@host/x", REFUSED),
        ("to", f"file://me:{SECRET}/a@host/x", REFUSED),
        ("to", f"file:///x?sig={SECRET}", REFUSED),
        ("options", SECRET, " is of type str, but it must be a mapping from names"),
        ("options", {"key": object()}, " 'key' is of type object, which JSON cannot"),
    ],
)
def test_refused_upload_options(option: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        ProfilerConfig(**{f"upload_{option}": value})
    assert str(error.value).startswith(f"profiler.upload_{option}{said}")
    assert SECRET not in str(error.value)


def test_missing_package_of_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    ProfilerConfig(enabled=False, upload_to="sftp://host/x")
    with pytest.raises(
        ConfigError, match=r"^The URL begins with s4://, which fsspec does not know"
    ):
        ProfilerConfig(upload_to="s4://bucket")
    for module, url, install in (
        ("paramiko", "sftp://host/x", "paramiko: pip install paramiko."),
        ("s3fs", "s3://bucket", "s3fs: pip install 'torch-instrument[s3]'."),
        ("fsspec", "file:///x", "fsspec: pip install 'torch-instrument[upload]'."),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            # as it was loaded by another test
            patch.delitem(_registry, url.partition(":")[0], raising=False)
            with pytest.raises(MissingPackage) as error:
                ProfilerConfig(upload_to=url)
        assert str(error.value).endswith(f" needs the package {install}")


@pytest.mark.parametrize("export", ["process", "inline"])
def test_no_file_and_no_log_tells_the_password_in_a_sinks_address(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, export: str
) -> None:
    address = f"https://me:{SECRET}@host/hook?sig={SECRET}"
    config = ProfilerConfig(
        sinks={"open": Posts(to="https://host/hook"), "posts": Posts(to=address)}, active=1
    )
    assert config.sinks_for_exporter.keys() == {"open", "posts"}, "another process hears it all"
    assert config.plain()["sinks"]["posts"]["to"] == "https://***@host/hook?***"
    with Session(config, output_dir=tmp_path / "profile", export=export) as session:
        session.step()
    (folder,) = (capture.folder for capture in session.captures)
    assert (folder / "posted.txt").read_text() == address
    assert SECRET not in (folder / "capture.json").read_text()
    assert SECRET not in repr(config) + str(config) + str(log)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (f"https://me:{SECRET}@host/x", "https://***@host/x"),
        (f"https://{SECRET}@host/x", "https://***@host/x"),
        (f"see 'az://c/x?sig={SECRET}&b=1' there", "see 'az://c/x?***' there"),
        ("s3://bucket/run@3", "s3://bucket/run@3"),
        ("http://localhost:9000/a@b", "http://localhost:9000/a@b"),
        ("sqlite:////tmp/x.db", "sqlite:////tmp/x.db"),
    ],
)
def test_of_a_url_user_password_and_query_are_left_out(url: str, told: str) -> None:
    assert redact({"a": [url]}) == {"a": [told]}
    assert SECRET not in str(public({"endpoint_url": url}))


@pytest.mark.parametrize("root", ["memory://", "memory:///"])
def test_captures_are_sent_to_the_root_of_a_file_system(tmp_path: Path, root: str) -> None:
    folder = record(tmp_path, root).captures[0].folder
    there = f"memory:///{remote_name(folder)}"
    try:
        assert upload.has_arrived(folder, root)
        assert contents(there, {}) == local(folder)
        assert Capture.load(there).name == folder.name
    finally:
        fsspec.filesystem("memory").rm(f"/{remote_name(folder)}", recursive=True)


def test_captures_below_the_root_of_a_file_system_have_urls_that_can_be_read() -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/below-root/capture.json", b"{}")
    try:
        (url,) = (url for url in storage.captures("memory://") if url.endswith("/below-root"))
        assert storage.captures(url) == [url]
    finally:
        files.rm("/below-root", recursive=True)


def test_each_way_in_which_a_url_cannot_be_read_is_one_sentence(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(url: str) -> str:
        s3fs.S3FileSystem.clear_instance_cache()
        assert command.main(["show", url]) == 2
        return capsys.readouterr().err.removeprefix("instrument: ")

    server.bucket("nothing-in-it")
    assert said("s3://nowhere/run").startswith(
        "There is nothing at s3://nowhere/run: give the URL of"
    )
    assert said("s3://nothing-in-it/run").startswith(
        "There is nothing at s3://nothing-in-it/run: give the URL of"
    )
    server.client.put_object(
        Bucket="nothing-in-it", Key="run/x/.y.partial/capture.json", Body=b"{}"
    )
    assert said("s3://nothing-in-it/run").startswith(
        "There is no capture at or below s3://nothing-in-it/run: "
    )
    chain = f"zip://x::file://{tmp_path}/a.zip"
    assert said(chain).startswith(f"{chain} is a chain of URLs for fsspec, which is not followed: ")
    assert said("nope://bucket").startswith(
        "The URL begins with nope://, which fsspec does not know"
    )
    assert said(f"file://{tmp_path}/none").startswith(f"There is nothing at file://{tmp_path}/none")
    with monkeypatch.context() as patch:
        for name in KEYS:
            patch.delenv(name.upper())
        patch.setenv("HOME", str(tmp_path))
        assert "Unable to locate credentials): set credentials with read access" in said(
            "s3://nothing-in-it/run"
        )
    server.stop()
    assert "check that the server can be reached" in said("s3://nothing-in-it/run")
    assert command.main(["export", "s3://nothing-in-it/run"]) == 2
    sentence = "is a URL, but only local folders can be finished: add --sink NAME"
    assert sentence in capsys.readouterr().err
