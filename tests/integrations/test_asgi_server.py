"""`profiler_app` in a real uvicorn server with FastAPI, asked over HTTP: the page's own server, and one that is killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from page_script import blocks
from waits import until

from instrument import Capture
from instrument.base import queue

pytestmark = pytest.mark.nightly
pytest.importorskip("fastapi", reason="the extra torch-instrument[dev] is not installed")
pytest.importorskip("uvicorn", reason="the extra torch-instrument[dev] is not installed")

DOCS = Path(__file__).parents[2] / "docs"


class Server:
    """A uvicorn server with the app of a module, on a port of its own."""

    def __init__(self, folder: Path, **env: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            handle = listener.fileno()
            command = ["-m", "uvicorn", "serve:app", "--fd", str(handle), "--log-level", "error"]
            self.process = subprocess.Popen(
                [sys.executable, *command], cwd=folder, env=os.environ | env, pass_fds=[handle]
            )

    def ask(self, method: str, path: str, content: Any = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = None if content is None else json.dumps(content)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"content-type": "application/json"} | names)
        answer = connection.getresponse()
        try:
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def serving(folder: Path, **env: str) -> Iterator[Server]:
    server = Server(folder, **env)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(300) in (0, -signal.SIGTERM, -signal.SIGKILL)


def test_the_server_of_the_page_answers_as_the_page_says(tmp_path: Path) -> None:
    pages = [blocks(path.read_text("utf-8")) for path in DOCS.glob("*.md")]
    (page,) = [each.body for found in pages for each in found if each.file == "serve.py"]
    (tmp_path / "serve.py").write_text(page)
    token = {"authorization": "Bearer mine"}
    with serving(tmp_path, PROFILER_TOKEN="mine") as server:
        assert server.ask("GET", "/profiler/windows/x")[0] == 401
        for wanted in ({"steps": 3}, {"seconds": 0.01}):
            status, body = server.ask("POST", "/profiler/windows", wanted, **token)
            window = json.loads(body)["id"]
            assert status == 202
            while json.loads(server.ask("GET", f"/profiler/windows/{window}", **token)[1])[
                "state"
            ] not in ("done", "failed"):
                assert server.ask("POST", "/predict", [1.0, 2.0, 3.0, 4.0])[0] == 200
            found = json.loads(server.ask("GET", f"/profiler/windows/{window}", **token)[1])
            assert found["diagnosis"]["verdict"]
            page_of = server.ask("GET", f"/profiler/windows/{window}/report", **token)[1]
            assert page_of.startswith(b"<!doctype html>")
    captures = [Capture.load(each) for each in sorted(tmp_path.glob("profile/steps*"))]
    assert [each.metadata["window"]["truncated"] for each in captures] == [False, False]
    assert len(captures[0].steps) == 3
    assert all(capture.ranges.where("name like '%predict'") for capture in captures)


SLOW = """
    from contextlib import asynccontextmanager
    from pathlib import Path
    import torch
    from fastapi import FastAPI
    from instrument import Session
    from instrument.integrations.asgi import profiler_app

    session = Session("on_demand", sinks={"slow": {"_target_": "slow.Slow"}, "report": {}})

    @asynccontextmanager
    async def lifespan(app):
        with session:
            yield

    app = FastAPI(lifespan=lifespan)
    app.mount("/profiler", profiler_app(session))

    @app.get("/sync")
    @session.record
    def synchronous():
        return float(torch.ones(4).sum())

    @app.get("/async")
    @session.record
    async def asynchronous():
        return float(torch.ones(4).sum())
"""
SINK = """
    import time
    from pathlib import Path
    from instrument import Sink

    class Slow(Sink):
        def write(self, capture, folder):
            while not (folder.parent / "go on").exists():
                time.sleep(0.01)
"""


@pytest.mark.parametrize("exporter_too", [False, True])
def test_killed_during_export_loses_nothing(tmp_path: Path, exporter_too: bool) -> None:
    (tmp_path / "serve.py").write_text(dedent(SLOW))
    (tmp_path / "slow.py").write_text(dedent(SINK))
    profile = tmp_path / "profile"
    with serving(tmp_path) as server:
        window = json.loads(server.ask("POST", "/profiler/windows", {"steps": 4})[1])["id"]
        for _ in range(4):
            for path in ("/sync", "/async"):
                assert server.ask("GET", path) == (200, b"4.0")
        (busy,) = until(lambda: queue.unfinished(profile) and list(profile.glob(".*.busy")))
        status, body = server.ask("GET", f"/profiler/windows/{window}")
        assert (status, json.loads(body)["state"]) == (200, "exporting")
        children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
        exporters = [int(each) for each in Path(children).read_text().split()]
        server.process.kill()
        server.process.wait()
        for each in exporters if exporter_too else []:
            os.kill(each, signal.SIGKILL)
    if exporter_too:
        assert busy.is_dir()
        subprocess.run([sys.executable, "-m", "instrument", "export", str(profile)], check=True)
    else:
        (profile / "go on").touch()
    finished = profile / queue.name_of(busy)
    until(finished.is_dir)
    assert len(Capture.load(finished).steps) == 4
    assert not queue.unfinished(profile)
