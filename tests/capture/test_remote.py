"""Captures at URLs: what a server lists leads nowhere else, and downloads have an end and a limit."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from builders import kernel, span, steps, write_capture, write_rank

from instrument.base import storage
from instrument.base.errors import CaptureError
from instrument.cli.command import main
from instrument.read.capture import Capture
from instrument.read.ranks.run import Run

EVIL = (
    "/run/../../evil/capture.json",
    "/other/c/capture.json",
    "capture.json",
    "/run/./x/capture.json",
    "/run",
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(storage, "_downloaded", {})
    storage._temporary_folder.cache_clear()
    yield folder
    storage._temporary_folder.cache_clear()


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def memory() -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    yield found
    found.store.clear()


@pytest.fixture
def server(memory: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server whose listing of `/run` holds one capture, and names that lead elsewhere."""
    memory.pipe_file("/run/c/capture.json", b"{}")
    memory.pipe_file("/other/c/capture.json", b'{"name": "other"}')
    find = type(memory).find

    def listing(self: Any, path: str, **options: Any) -> Any:
        return find(self, path, **options) | {
            name: {"type": "file", "size": 2, "name": name} for name in EVIL
        }

    monkeypatch.setattr(type(memory), "find", listing)
    return memory


def test_a_listing_names_only_what_is_below(temporary: Path, server: Any) -> None:
    assert storage.captures("memory://run") == ["memory://run/c"]
    assert Capture.load("memory://run/c").name == "c"
    written = [file for file in temporary.parent.rglob("*") if file.is_file()]
    assert written
    assert all(temporary in file.parents for file in written)


@pytest.mark.parametrize("url", ["memory://run/..", "memory://"])
def test_a_url_without_a_name_is_refused(temporary: Path, server: Any, url: str) -> None:
    with pytest.raises(CaptureError, match="names no capture: give the URL of a capture"):
        storage.fetch(url)
    assert not [*temporary.iterdir()]


def test_links_below_a_local_url_are_not_followed(tmp_path: Path) -> None:
    own = write_capture(tmp_path / "here", steps(), "own").folder
    theirs = write_capture(tmp_path / "elsewhere", steps(), "theirs").folder
    secret = tmp_path / "secret"
    secret.write_text('{"name": "secret"}')
    (tmp_path / "here" / "linked").symlink_to(theirs.parent)
    (own / "summary.json").symlink_to(secret)
    (tmp_path / "here" / "evil").mkdir()
    (tmp_path / "here" / "evil" / "capture.json").symlink_to(secret)
    assert storage.captures(f"file://{tmp_path}/here") == [f"file://{own}"]
    assert storage.contents([f"file://{own}/summary.json"], bytes) == {}
    assert Run.load(f"file://{tmp_path}/here").windows[0].paths == [f"file://{own}"]
    with pytest.raises(CaptureError, match="There is no capture"):
        Capture.load(f"file://{tmp_path}/here/evil")
    (own / "trace.json.gz").unlink()
    (own / "trace.json.gz").symlink_to(theirs / "trace.json.gz")
    assert Capture.load(f"file://{own}").trace_path is None
    (tmp_path / "mine").symlink_to(theirs)
    assert Capture.load(f"file://{tmp_path}/mine").trace_path is not None, (
        "the user's own link is followed"
    )


def test_a_copy_is_used_again_until_the_capture_changes(memory: Any) -> None:
    memory.pipe_file("/run/capture.json", b'{"name": "first"}')
    memory.pipe_file("/run/trace.json", b'{"traceEvents": []}')
    memory.pipe_file("/run/table.txt", b"no reader needs it")
    first = Capture.load("memory://run")
    assert files_below(first.folder) == ["capture.json", "trace.json"]
    assert Capture.load("memory://run").folder == first.folder
    memory.pipe_file("/run/capture.json", b'{"name": "second"}')
    second = Capture.load("memory://run")
    assert (first.name, second.name, len(second.events)) == ("first", "second", 0)
    assert (second.place, str(second)) == ("memory://run", "<Capture 'second' at memory://run>")


FORKING = """
import os, sys
from instrument import Capture
capture = Capture.load(sys.argv[1])
if not os.fork():
    sys.exit()
os.wait()
assert len(capture.events) == int(sys.argv[2])
"""


def test_the_copies_are_removed_when_their_process_ends(tmp_path: Path, temporary: Path) -> None:
    capture = write_capture(tmp_path, steps())
    command = [sys.executable, "-c", FORKING, f"file://{capture.folder}", str(len(capture.events))]
    subprocess.run(command, env={**os.environ, "TMPDIR": str(temporary)}, check=True)
    assert not [*temporary.iterdir()]


class Endless:
    """A file without an end; notes how many bytes were read."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> Endless:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, count: int) -> bytes:
        self.bytes += count
        return bytes(count)


@pytest.fixture
def endless(memory: Any, monkeypatch: pytest.MonkeyPatch) -> Endless:
    """What the server sends for each file; the limit for traces is 2,500 bytes, read by 1,000."""
    found, opening = Endless(), type(memory).open
    monkeypatch.setattr(
        type(memory),
        "open",
        lambda self, path, mode, **options: (
            found if mode == "rb" else opening(self, path, mode, **options)
        ),
    )
    monkeypatch.setattr(storage, "MOST_TRACE_BYTES", 2_500)
    monkeypatch.setattr(storage, "MOST_METADATA_BYTES", 1_500)
    monkeypatch.setattr(storage, "_BLOCK", 1_000)
    monkeypatch.setattr(storage, "_SMALL_BLOCK", 1_000)
    return found


@pytest.mark.parametrize(
    ("file", "named", "read", "why"),
    [
        ("trace.json", 2_501, 0, "has more than 2.44 KiB, so it is not downloaded"),
        ("run/capture.json", 1_501, 0, "has more than 1.46 KiB, so it is not downloaded"),
        ("trace.json", None, 3_000, "has more than 2.44 KiB, so it is not downloaded"),
        ("run/capture.json", None, 2_000, "has more than 1.46 KiB, so it is not downloaded"),
        ("trace.json", 900, 1_000, "does not have the 900 B that the server names"),
    ],
)
def test_no_file_is_downloaded_beyond_its_limit(
    memory: Any,
    endless: Endless,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    named: int | None,
    read: int,
    why: str,
) -> None:
    memory.pipe_file(f"/{file}", b"")
    info, told = type(memory).info, {"size": named}
    monkeypatch.setattr(type(memory), "info", lambda *args, **_: info(*args) | told)
    found = {f"/{file}": memory.info(f"/{file}")}
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: found)
    assert main(["show", f"memory://{file.removesuffix('/capture.json')}"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"instrument: memory:///{file} {why}")
    assert endless.bytes == read
    assert files_below(temporary) == []


def test_a_shorter_file_than_the_server_names_is_an_error(memory, monkeypatch) -> None:
    memory.pipe_file("/trace.json", b'{"traceEvents": [')
    info = type(memory).info
    monkeypatch.setattr(type(memory), "info", lambda *args, **_: info(*args) | {"size": 99})
    with pytest.raises(CaptureError, match="does not have the 99 B that the server names"):
        Capture.load("memory://trace.json")


def test_no_more_is_downloaded_than_fits(memory, endless, monkeypatch, temporary) -> None:
    usage = type("Usage", (), {"free": 1_200})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    memory.pipe_file("/trace.json", bytes(2_000))
    with pytest.raises(CaptureError, match=r"has 1.95 KiB, but .* has room for 1.17 KiB: set TMPD"):
        Capture.load("memory://trace.json")
    assert endless.bytes == 0


def test_small_files_have_a_limit_too(memory: Any, endless: Endless) -> None:
    memory.pipe_file("/run/summary.json", b"")
    assert storage.contents(["memory://run/summary.json"], bytes, 4_500) == {}
    assert endless.bytes == 5_000


def test_large_files_of_a_list_are_read_one_after_the_other(memory, monkeypatch) -> None:
    monkeypatch.setattr(storage, "_SMALL_BLOCK", 1_000)
    at_once, most = [0], [0]

    def decode(content: bytes) -> int:
        at_once[0] += len(content) > 1_000
        most[0] = max(most[0], at_once[0])
        threading.Event().wait(0.001)  # lets other threads run
        at_once[0] -= len(content) > 1_000
        return len(content)

    for k in range(50):
        memory.pipe_file(f"/{k}/summary.json", bytes(900 + 500 * (k % 2)))
    urls = [f"memory://{k}/summary.json" for k in range(51)]
    found = storage.contents(urls, decode)
    assert found == {url: 900 + 500 * (k % 2) for k, url in enumerate(urls[:50])}
    assert most == [1]


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one trace without an end, and one with an end; no parts of them."""

    protocol_version = "HTTP/1.1"
    trace = json.dumps({"traceEvents": [span("mm", k, 1) for k in range(99)]}).encode()

    def do_HEAD(self) -> None:
        self.send_response(200)
        if self.path == "/trace.json":
            self.send_header("Content-Length", str(len(self.trace)))
        else:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        if self.path == "/trace.json":
            self.wfile.write(self.trace)
            return
        self.close_connection = True
        try:
            while True:
                self.wfile.write(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        except OSError:
            self.server.left.set()  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_without_sizes_or_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(storage, "MOST_TRACE_BYTES", 200_000)
    monkeypatch.setattr(storage, "_BLOCK", 1_000)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.left = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{served.server_port}"
            assert len(Capture.load(f"{url}/trace.json").events) == 99
            with pytest.raises(CaptureError, match=r"endless.json has more than 195.3 KiB"):
                Capture.load(f"{url}/endless.json")
            assert served.left.wait(120), "the connection is closed"  # type: ignore[attr-defined]
        finally:
            fsspec.filesystem("http").clear_instance_cache()
            served.shutdown()
            thread.join()


def test_no_trace_of_a_run_is_downloaded_twice(memory, tmp_path, monkeypatch) -> None:
    for rank in range(3):
        made = write_rank(tmp_path / "run", rank, [*steps(), kernel("k", 0, 9)], 3)
        (made.folder / "summary.json").unlink()
    memory.put(str(tmp_path / "run"), "/run", recursive=True)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    opened: list[str] = []
    opening = type(memory).open

    def noted(self: Any, path: str, *args: Any, **options: Any) -> Any:
        opened.append(Path(path).parent.name + "/" + Path(path).name)
        return opening(self, path, *args, **options)

    monkeypatch.setattr(type(memory), "open", noted)
    assert main(["ranks", "memory://run", "--trace", str(tmp_path / "merged.json")]) == 0
    traces = [path for path in opened if path.endswith("trace.json.gz")]
    assert sorted(traces) == [f"steps_000003-000004_rank{rank}/trace.json.gz" for rank in range(3)]
    local = Run.load(tmp_path / "run").windows[0]
    assert Run.load("memory://run").windows[0].summaries == local.summaries
