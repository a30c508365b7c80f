"""Uploads to a real S3 server on this machine and to folders: what arrives, and what is kept."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pytest
import s3fs
import torch
from collected import Log
from fsspec.registry import _registry
from moto.server import ThreadedMotoServer
from own_sinks import Posts

from instrument import Capture, ProfilerConfig, Session, storage
from instrument.cli import command
from instrument.errors import CaptureError, ConfigError, MissingPackage
from instrument.redact import public, redact
from instrument.worker import upload, waiting

# botocore calls datetime.utcnow, and moto's server is closed by another thread than began it
pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")

SECRET = "hunter22-of-the-bucket"
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
        return {
            "endpoint_url": self.url,
            "key": "anybody",
            "secret": SECRET,
        }


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
    monkeypatch.setattr(upload, "_PAUSES_S", (0.05,) * 5)
    s3fs.S3FileSystem.clear_instance_cache()
    yield running_server
    s3fs.S3FileSystem.clear_instance_cache()
    if running_server.moto is None:
        running_server.start()


def record(folder: Path, url: str, windows: int = 1, **options: Any) -> Session:
    given = {
        "active": 1,
        "repeat": windows,
        "output_dir": str(folder),
        "upload_to": url,
        "export": "inline",
    }
    with Session(**given | options) as session:
        for _ in range(windows):
            torch.ones(2).sum()
            session.step()
    return session


def local(folder: Path) -> dict[str, bytes]:
    """What of a capture must arrive."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "upload.json"}


def sent(objects: dict[str, bytes], name: str) -> dict[str, bytes]:
    prefix = f"runs/{name}/"
    found = {
        key.removeprefix(prefix): body for key, body in objects.items() if key.startswith(prefix)
    }
    assert list(json.loads(found.pop("upload.json"))) == ["token"]
    return found


def until(true: Callable[[], bool]) -> None:
    """Wait for what comes within a second, if it comes."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_exporter_sends_each_capture_and_readers_find_there_what_lies_here(
    server: Server, tmp_path: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.bucket("by-the-exporter")
    session = record(
        tmp_path,
        url,
        2,
        export="process",
        sinks={"table": {}},
        upload_options=server.options,
        timings={"every": 1},
    )
    objects = server.objects("by-the-exporter")
    for capture in session.captures:
        assert capture.folder is not None
        assert sent(objects, capture.name) == local(capture.folder)
        assert set(local(capture.folder)) == {
            "capture.json",
            "summary.json",
            "table.txt",
            "trace.json.gz",
        }
        assert f"exporter: Sent {capture.name} to {url}/{capture.name}" in log.at("INFO")
        there = Capture.load(f"{url}/{capture.name}")
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
    for place in (f"{url}/{ALL[1]}", url):  # below a folder the newest
        assert command.main(["show", place, "--ops"]) == 0
        there_too, told = capsys.readouterr()
        assert there_too.splitlines()[2:] == here.splitlines()[2:]
    assert told == (
        f"Showing the newest of 2 captures, {url}/{ALL[1]}; the others are:\n  {url}/{ALL[0]}\n"
    )  # of the folder
    assert command.main(["show", f"{url}/{ALL[1]}/trace.json.gz", "--ops"]) == 0
    timings = (
        tmp_path / "timings_rank0.jsonl"
    ).read_bytes()  # of the run, and not sent with a capture
    server.client.put_object(Bucket="by-the-exporter", Key="timings.jsonl", Body=timings)
    assert command.main(["show", "s3://by-the-exporter/timings.jsonl"]) == 0
    assert "ProfilerStep" in capsys.readouterr().out
    assert command.main(["export", url, "--sink", "table", "--to", str(tmp_path / "tables")]) == 0
    assert names(tmp_path / "tables") == ALL[:2]
    assert names(tmp_path / "tables" / ALL[0]) == ["table.txt"]


def test_a_server_that_comes_back_gets_what_it_missed_and_only_then_is_it_removed_here(
    server: Server, tmp_path: Path, log: Log
) -> None:
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
    assert all(
        set(sent(objects, name)) == {"capture.json", "summary.json", "trace.json.gz"}
        for name in ALL
    )
    assert sent(objects, ALL[2]) == local(output / ALL[2])


def test_a_server_that_is_away_is_said_once_and_export_sends_later(
    server: Server, tmp_path: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.bucket("away")
    server.stop()
    log.errors_expected = True
    session = record(tmp_path / "profile", url, 3, upload_options=server.options, keep=1)
    output = session.output_dir
    assert output is not None
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
    assert (
        f"1 of 1 captures could not be finished or sent. {ALL[0]}: Could not connect"
        in capsys.readouterr().err
    )
    server.start()
    assert command.main(["export", str(tmp_path), "--upload-to", url]) == 0
    assert sorted(capsys.readouterr().out.removeprefix("Sent ").rstrip(".\n").split(", ")) == [
        f"{url}/{n}" for n in ALL
    ]
    objects = server.objects("away")
    assert all(sent(objects, name) == local(output / name) for name in ALL)
    assert command.main(["export", str(tmp_path), "--upload-to", url]) == 0
    assert capsys.readouterr().out.startswith("No capture in ")


def test_captures_are_sent_elsewhere_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (f"file://{tmp_path / name}" for name in ("first", "second"))
    session = record(tmp_path / "out", first)
    (capture,) = session.captures
    for _ in range(2):
        assert command.main(["export", str(tmp_path / "out"), "--upload-to", second]) == 0
    assert capsys.readouterr().out == (
        f"Sent {second}/{capture.name}.\n"
        f"No capture in {tmp_path / 'out'} waits for export; to run a sink on captures, add "
        "--sink NAME.\n"
    )
    assert capture.folder
    assert {file.name for file in (tmp_path / "second" / capture.name).iterdir()} - {
        "upload.json"
    } == set(local(capture.folder))


def test_a_server_that_dies_in_the_middle_shows_no_capture_and_later_gets_the_rest(
    server: Server, tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.bucket("dies")
    put, files = upload._put, []

    def put_and_die(fs: Any, file: Path, there: str) -> None:
        put(fs, file, there)
        files.append(file.name)
        server.stop()

    log.errors_expected = True
    with monkeypatch.context() as patch:
        patch.setattr(upload, "_put", put_and_die)
        session = record(
            tmp_path / "profile", url, upload_options=server.options, sinks={"table": {}}
        )
    assert files == ["summary.json"]
    server.start()
    assert [key.rpartition("/")[2] for key in server.objects("dies")] == [
        "summary.json",
        "upload.json",
    ]
    with pytest.raises(
        CaptureError, match=r"There is no capture at s3://dies/runs/.*: it has no capture\.json"
    ):
        Capture.load(f"{url}/{ALL[0]}")

    monkeypatch.setattr(
        upload, "_put", lambda fs, file, there: (put(fs, file, there), files.append(file.name))
    )
    assert command.main(["export", str(tmp_path), "--upload-to", url]) == 0
    assert files == ["summary.json", "table.txt", "trace.json.gz", "capture.json"], (
        "each once, capture.json last"
    )
    assert sent(server.objects("dies"), ALL[0]) == local(session.captures[0].folder or Path())


def test_a_hanging_upload_delays_no_window_and_a_killed_exporter_leaves_one_for_later(
    server: Server, tmp_path: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.bucket("killed")
    server.stop()
    log.errors_expected = True
    output = tmp_path / "profile"
    given = {
        "upload_to": url,
        "upload_options": server.options,
        "output_dir": str(output),
        "export_timeout_s": 60,
    }
    with Session(active=1, repeat=2, **given) as session:
        assert session.loop.run is not None
        exporter = session.loop.run.capture_queue.exporter
        assert exporter is not None
        with socket.create_server(("127.0.0.1", server.port)) as deaf:
            session.step()
            asking, _ = deaf.accept()  # and never answer
        session.step()
        until(lambda: len(session.captures) == 2)
        server.start()
        assert exporter._process is not None
        exporter._process.kill()
    asking.close()
    (error,) = log.at("ERROR")
    assert error.startswith(
        f"The exporter ended while it worked on {ALL[0]} (SIGKILL). The capture is kept, and "
        f"`instrument export {output} --upload-to {url}` "
    )
    assert log.at("WARNING") == [
        f"These captures are not sent to {url} yet and are kept on disk: {ALL[0]}. `instrument "
        f"export {output} --upload-to {url}` sends captures that have not arrived."
    ], "another exporter has sent the second"
    assert sent(server.objects("killed"), ALL[1]) == local(output / ALL[1])
    assert command.main(["export", str(output), "--upload-to", url]) == 0
    assert capsys.readouterr().out == f"Sent {url}/{ALL[0]}.\n"
    assert sent(server.objects("killed"), ALL[0]) == local(output / ALL[0])


def test_stop_says_what_it_waits_for_and_gives_up_in_time(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, send = threading.Event(), upload.send
    monkeypatch.setattr("instrument.worker.waiting._SILENT_S", 0.0)
    monkeypatch.setattr(upload, "send", lambda *about: (gate.wait(), send(*about))[1])
    url = f"file://{tmp_path}/there"
    session = record(tmp_path / "here", url, 2, export_timeout_s=0.2)
    assert (
        f"Waiting for the upload, at most 0.2 s: 2 of 2 windows are left (current: {ALL[0]})"
        in log.at("INFO")
    )
    (warning,) = log.at("WARNING")
    assert warning.startswith(
        f"These captures are not sent to {url} yet and are kept on disk: {ALL[0]}, {ALL[1]}. "
    )
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "instrument upload":
            thread.join()
    assert names(tmp_path / "there") == [capture.name for capture in session.captures]


def test_left_ones_that_come_back_are_counted_again(
    monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    monkeypatch.setattr("instrument.worker.waiting._SILENT_S", 0.0)
    monkeypatch.setattr("instrument.worker.waiting._LOG_EVERY_S", 0.0)
    left = iter([["d"], ["d"], ["a", "b", "c"], []])
    changed = threading.Condition()
    with changed:
        waiting.wait(changed, lambda: next(left), 60, "upload")
    told = [line.partition(": ")[2] for line in log.at("INFO")]
    assert told == [
        "1 of 1 windows are left (current: d)",
        "3 of 3 windows are left (current: a)",
    ]


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
        given = {
            "output_dir": str(here),
            "upload_to": url,
            "export": "inline",
            "export_timeout_s": 10_000,
        }
        with suppress(ZeroDivisionError), Session(active=1, **given) as session:
            session.step()
            assert reached.wait(60)
            1 / 0  # noqa: B018
    assert log.at("WARNING") == [
        f"These captures are not sent to {url} yet and are kept on disk: {ALL[0]}. `instrument "
        f"export {here} --upload-to {url}` sends captures that have not arrived."
    ]
    assert command.main(["export", str(here), "--upload-to", url]) == 0
    assert capsys.readouterr().out == f"Sent {url}/{ALL[0]}.\n"
    gate.set()


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("The specified bucket does not exist"),
        PermissionError("Access Denied"),
        RuntimeError("cannot schedule new futures after interpreter shutdown"),
    ],
)
def test_what_no_further_try_can_help_has_none(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    log.errors_expected = True
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


def test_a_bucket_that_is_missing_is_told_by_the_first_try(
    server: Server, tmp_path: Path, log: Log
) -> None:
    log.errors_expected = True
    record(tmp_path, "s3://no-such-bucket/runs", upload_options=server.options)
    assert "The specified bucket does not exist" in log.at("ERROR")[0]
    assert not [line for line in log.at("DEBUG") if "not sent yet" in line]


def test_what_arrived_short_or_changed_counts_as_not_arrived(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.bucket("short")
    folder = record(tmp_path, url, upload_options=server.options).captures[0].folder
    assert folder is not None
    trace = f"runs/{folder.name}/trace.json.gz"
    for damaged in (b"short", bytes(len(local(folder)["trace.json.gz"]))):
        server.client.put_object(Bucket="short", Key=trace, Body=damaged)
        with monkeypatch.context() as patch:
            patch.setattr(upload, "_put", lambda *_: None)
            with pytest.raises(
                CaptureError,
                match=r"1 of the capture's files did not arrive completely, such as trace\.json\.gz",
            ):
                upload.send(folder, url, server.options)
        assert not upload.has_arrived(folder, url)
        upload.send(folder, url, server.options)
        assert sent(server.objects("short"), folder.name) == local(folder)
        assert upload.has_arrived(folder, url)


def test_without_sums_the_sizes_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/there"
    folder = record(tmp_path / "here", url).captures[0].folder
    assert folder is not None
    (tmp_path / "there" / folder.name / "trace.json.gz").write_bytes(b"short")
    with monkeypatch.context() as patch:
        patch.setattr(upload, "_put", lambda *_: None)
        with pytest.raises(
            CaptureError,
            match=r"1 of the capture's files did not arrive completely, such as trace\.json\.gz",
        ):
            upload.send(folder, url, {})
    upload.send(folder, url, {})
    assert local(tmp_path / "there" / folder.name) == local(folder)


@pytest.mark.parametrize("kind", ["s3", "file", "memory"])
def test_another_runs_capture_of_the_name_stays_as_it_is(
    server: Server, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = {
        "s3": "s3://earlier/runs",
        "file": f"file://{tmp_path}/there",
        "memory": f"memory://{tmp_path}",
    }[kind]
    if kind == "s3":
        server.bucket("earlier")
    options = server.options if kind == "s3" else {}
    sessions = [
        record(tmp_path / str(number), f"{url}/", 1, upload_options=options) for number in range(3)
    ]
    for number, session in enumerate(sessions):
        there = Capture.load(url + "/" + ALL[0] + ("" if number == 0 else f"-{number + 1}"))
        assert there.metadata["started_at"] == session.captures[0].metadata["started_at"]
        assert list(there.operators) == list(session.captures[0].operators)
    fs, path = storage.filesystem(url, options)
    fs.pipe_file(f"{path}/{ALL[0]}-4/notes.txt", b"by hand") if kind != "file" else None
    record(tmp_path / "again", url, 1, upload_options=options)
    assert fs.exists(f"{path}/{ALL[0]}-{'4' if kind == 'file' else '5'}/capture.json")
    assert command.main(["show", url]) == 0
    assert "newest of 4 captures" in capsys.readouterr().err


def test_two_that_claim_a_folder_at_once_do_not_both_get_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.bucket("claims")
    fs, _ = storage.filesystem("s3://claims", server.options)
    monkeypatch.setattr(fs, "find", lambda *_, **__: [])  # both have looked before either wrote
    assert [upload._claim_folder(fs, "claims/a", token) for token in ("one", "other", "one")] == [
        True,
        False,
        True,
    ]


def test_a_large_file_in_place_of_a_claim_is_not_downloaded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.bucket("claims")
    server.client.put_object(Bucket="claims", Key="b/upload.json", Body=bytes(10_000))
    fs, _ = storage.filesystem("s3://claims", server.options)
    read: list[str] = []
    monkeypatch.setattr(fs, "cat_file", read.append)
    assert upload._claim_folder(fs, "claims/b", "token") is False
    assert read == []


def test_a_capture_that_fails_by_itself_holds_up_no_other(
    tmp_path: Path, log: Log, monkeypatch: Any
) -> None:
    log.errors_expected = True
    monkeypatch.setattr(upload, "_PAUSES_S", ())
    send, tried = upload.send, []

    def send_or_not(folder: Path, *about: Any) -> str:
        tried.append(folder.name)
        if tried == [ALL[0]]:
            raise OSError(f"{SECRET} was refused")
        return send(folder, *about)

    monkeypatch.setattr(upload, "send", send_or_not)
    session = record(
        tmp_path / "here",
        f"file://{tmp_path}/there",
        2,
        upload_options={"token": SECRET, "keys": [SECRET]},
    )
    assert tried == [*ALL[:2], ALL[0]], "tried again when another had arrived"
    assert names(tmp_path / "there") == ALL[:2]
    assert "(*** was refused)" in log.at("ERROR")[0]
    assert log.at("WARNING") == []
    assert len(session.captures) == 2


def test_a_sink_of_this_process_has_run_before_the_capture_is_sent(tmp_path: Path) -> None:
    class Here:
        def write(self, capture: Capture, folder: Path) -> None:
            (folder / "here.txt").write_text(str(os.getpid()))

    url = f"file://{tmp_path}/there"
    session = record(tmp_path / "here", url, export="process", sinks={"here": Here(), "table": {}})
    run = session.loop.run
    assert run is not None
    assert run.capture_queue.exporter is not None
    assert run.capture_queue.exporter._job.upload_to is None, "the worker sends nothing"
    assert run.capture_queue.exporter._job.owner == os.getuid(), (
        "and takes only folders of this user"
    )
    assert {"here.txt", "table.txt", "capture.json"} <= set(names(tmp_path / "there" / ALL[0]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"upload_to": "/mnt/captures"},
            "profiler.upload_to is '/mnt/captures', but it must be a URL such as s3://",
        ),
        (
            {"upload_to": "s4://bucket"},
            "The URL begins with s4://, which fsspec does not know: use a URL such as s3://",
        ),
        (
            {"upload_to": f"file://me:{SECRET}@host/x"},
            "profiler.upload_to is a URL with a password or a query (the text after `?`). This URL would be",
        ),
        (
            {"upload_to": f"file://me:{SECRET}/a@host/x"},
            "profiler.upload_to is a URL with a password or a query (the text after `?`). This URL would be",
        ),
        (
            {"upload_to": f"file:///x?sig={SECRET}"},
            "profiler.upload_to is a URL with a password or a query (the text after `?`). This URL would be",
        ),
        (
            {"upload_options": SECRET},
            "profiler.upload_options is of type str, but it must be a mapping from names",
        ),
        (
            {"upload_options": {"key": object()}},
            "profiler.upload_options 'key' is of type object, which JSON cannot",
        ),
    ],
)
def test_what_cannot_work_is_refused_when_the_config_is_built(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        ProfilerConfig(**options)
    assert str(error.value).startswith(said)
    assert SECRET not in str(error.value)


def test_a_missing_package_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ProfilerConfig(enabled=False, upload_to="sftp://host/x")
    for module, url, install in (
        ("paramiko", "sftp://host/x", "paramiko: pip install paramiko."),
        ("s3fs", "s3://bucket", "s3fs: pip install 'torch-instrument[s3]'."),
        ("fsspec", "file:///x", "fsspec: pip install 'torch-instrument[upload]'."),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            patch.delitem(
                _registry, url.partition(":")[0], raising=False
            )  # as it was loaded by another test
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
    assert config.inline_sinks == [], "another process hears the address through a pipe"
    assert config.plain()["sinks"]["posts"]["to"] == "https://***@host/hook?***"
    with Session(config, output_dir=tmp_path / "profile", export=export) as session:
        session.step()
    (folder,) = (capture.folder for capture in session.captures)
    assert folder is not None
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
    assert (
        "is a URL, but only local folders can be finished: add --sink NAME"
        in capsys.readouterr().err
    )
