"""`profiler_app`, driven as an ASGI server drives it: windows on request, who is answered, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collected import Log
from waits import end_of_thread

from instrument import Session, diagnose, profiled
from instrument.base import files, queue
from instrument.base.errors import ConfigError
from instrument.export.exporter import Exporter
from instrument.integrations import asgi
from instrument.integrations.asgi import profiler_app
from instrument.read.advise.diagnosis import as_json
from instrument.record import limits
from instrument.record.finisher import Finisher
from instrument.record.triggers.trigger import Request

HERE, ELSEWHERE = ("127.0.0.1", 8000), ("192.0.2.7", 8000)


async def asked(app: Any, method: str, path: str, body: bytes = b"", **scope: Any) -> Any:
    """The status, the body and the headers of one request; its body comes in pieces of 100 bytes."""
    host = {"host": "localhost:8000"} | scope.pop("headers", {})
    headers = [(name.encode(), value.encode()) for name, value in host.items()]
    given = {"type": "http", "method": method, "path": path, "headers": headers, "root_path": ""}
    given |= {"server": HERE, "client": ("127.0.0.1", 50000)} | scope
    pieces = [body[at : at + 100] for at in range(0, len(body), 100)] or [b""]
    taken: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        taken.append(message)

    await app(given, receive, send)
    start, end = taken
    return start["status"], end["body"], dict(start["headers"])


def ask(app: Any, method: str, path: str, content: object = None, **scope: Any) -> Any:
    """The status and the JSON of an answer."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    status, answer, _ = asyncio.run(asked(app, method, path, body, **scope))
    return status, json.loads(answer)


def post(app: Any, **wanted: Any) -> str:
    status, answer = ask(app, "POST", "/windows", wanted)
    assert (status, answer["state"]) == (202, "waiting")
    return answer["id"]


def state(app: Any, window: str) -> str:
    status, answer = ask(app, "GET", f"/windows/{window}")
    assert (status, answer["id"]) == (200, window)
    return answer["state"]


def on_demand(folder: Path, **options: Any) -> Session:
    return Session("on_demand", output_dir=folder, **options)


@pytest.fixture(autouse=True)
def finished_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session finishes its windows itself, because starting an exporter takes a second."""

    def finish(self: Finisher) -> None:
        exporter = Exporter(self.output_dir, self._job)
        for window in exporter.queued():
            exporter.finish(window)

    monkeypatch.setattr(Finisher, "_wake", finish)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    # without lines: what they say of the run changes until its end
    with on_demand(tmp_path, lines=False) as running:
        yield running


def test_window_states_diagnosis_and_page(session: Session) -> None:
    app = profiler_app(session)
    window = post(app, steps=2)
    assert (state(app, window), ask(app, "GET", f"/windows/{window}/report")[0]) == ("waiting", 404)
    session.step()
    assert state(app, window) == "waiting", "it warms up"
    session.step()
    for _ in range(2):
        assert state(app, window) == "recording"
        torch.ones(2).add(1)
        session.step()
    (capture,) = session.captures
    assert capture.steps.column("number") == [2, 3]
    status, answer = ask(app, "GET", f"/windows/{window}")
    assert (status, answer["state"], answer["capture"]) == (200, "done", capture.name)
    assert answer["diagnosis"] == json.loads(as_json(diagnose([capture])))
    assert answer["diagnosis"]["verdict"].startswith("A step takes ")
    status, page, headers = asyncio.run(asked(app, "GET", f"/windows/{window}/report"))
    assert (status, headers[b"content-type"]) == (200, b"text/html")
    assert page == (capture.folder / "report.html").read_bytes()
    assert state(app, window) == "done"


def test_seconds_end_with_a_whole_step(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now))
    app = profiler_app(session)
    window = post(app, seconds=2.5)
    for _ in range(3):
        session.step()
    now += 2.4
    session.step()
    assert state(app, window) == "recording"
    now += 0.2
    session.step()
    assert state(app, window) == "done"
    (capture,) = session.captures
    about = capture.metadata["window"]
    assert (about["first_step"], about["last_step"], about["planned_steps"]) == (2, 4, None)
    assert (about["truncated"], about["reason"]) == (False, None)


def test_seconds_end_without_a_request(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_LOOK_S", 0.001)
    monkeypatch.setattr(limits, "_LEAST_EXTRA_S", 0.0)
    app = profiler_app(session)
    window = post(app, seconds=0.001)
    session.step()
    session.step()
    end_of_thread("instrument-limits")
    assert state(app, window) == "done"
    assert session.captures[0].metadata["window"]["truncated"] is False


def test_a_window_of_seconds_that_the_run_ends_is_truncated(session: Session, log: Log) -> None:
    log.expect("for 60 s ended early, after 1 step (the run ended)")
    app = profiler_app(session)
    window = post(app, seconds=60)
    for _ in range(3):
        session.step()
    session.stop()
    assert state(app, window) == "done"
    assert session.captures[0].metadata["window"]["reason"] == "the run ended"


def test_another_limit_of_the_session_cuts_a_window_of_steps(tmp_path: Path, log: Log) -> None:
    log.expect("profiler.max_window_s=1e-09 was reached")
    with on_demand(tmp_path, max_window_s=1e-9) as session:
        app = profiler_app(session)
        status, answer = ask(app, "POST", "/windows", {"seconds": 1})
        assert (status, "to 1e-09 seconds" in answer["error"]) == (400, True)
        window = post(app, steps=9)
        for _ in range(3):
            session.step()
        assert state(app, window) == "done"
    assert session.captures[0].metadata["window"]["truncated"] is True


def test_one_window_at_a_time(session: Session) -> None:
    app = profiler_app(session)
    window = post(app, steps=1)
    for _ in range(3):
        status, answer = ask(app, "POST", "/windows", {"steps": 1})
        assert (status, answer["id"]) == (409, window)
        session.step()
    assert state(app, window) == "done"
    assert post(app, steps=1) != window


@pytest.fixture
def unexported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session whose windows stay queued, as if the exporter had been killed before."""
    monkeypatch.setattr(Finisher, "_wake", lambda _: None)
    with on_demand(tmp_path) as running:
        yield running
        running._loop.run.finisher.pending.clear()


def test_window_without_exporter_stays_exporting(unexported: Session) -> None:
    app, windows = profiler_app(unexported), []
    for _ in range(2):
        windows.append(post(app, steps=1))
        for _ in range(3):
            unexported.step()
    assert [state(app, each) for each in windows] == ["exporting"] * 2
    busy = queue.take(unexported._loop.run.finisher.pending[0])
    assert [state(app, each) for each in windows] == ["exporting"] * 2
    queue.say_why(busy, "The exporter ended while it worked on it (SIGKILL).")
    assert [state(app, each) for each in windows] == ["failed", "exporting"]


def test_the_windows_of_the_app_and_of_the_command_are_both_recorded(session: Session) -> None:
    app, requests = profiler_app(session), session._loop.run.triggers.requests
    requests["file"] = Request("instrument trigger requested a window", 2)
    window = post(app, steps=1)
    for _ in range(7):
        session.step()
    assert state(app, window) == "done"
    abouts = [each.metadata["window"] for each in session.captures]
    assert [(each["trigger"], each["steps"]) for each in abouts] == [
        ("session.request", 1),
        ("file", 2),
    ]
    assert abouts[0]["trigger_reason"] == f"POST /windows, id {window}"


def test_a_window_that_the_program_itself_requested_comes_first(session: Session) -> None:
    app, own = profiler_app(session), session.request(steps=1)
    status, answer = ask(app, "POST", "/windows", {"steps": 1})
    assert (status, answer["error"].startswith("A window that the program")) == (409, True)
    session.step()
    assert own.state == "waiting", "it warms up"
    window = post(app, steps=1)
    for _ in range(6):
        session.step()
    assert (own.state, state(app, window)) == ("done", "done")


def test_a_window_that_was_dropped_has_failed(session: Session, log: Log) -> None:
    log.expect("is not recorded: session.step_number was set")
    app = profiler_app(session)
    window = post(app, steps=1)
    session.step()
    session.step_number = 1000
    session.step()
    assert state(app, window) == "failed"


def test_oldest_windows_are_forgotten(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_KNOWN_WINDOWS", 2)
    app, windows = profiler_app(session), []
    for _ in range(3):
        windows.append(post(app, steps=1))
        for _ in range(3):
            session.step()
    statuses = [ask(app, "GET", f"/windows/{each}")[0] for each in windows]
    assert statuses == [404, 200, 200]


def test_a_session_that_does_not_run_records_nothing(tmp_path: Path) -> None:
    session = on_demand(tmp_path)
    for app in (profiler_app(session), profiler_app(Session(None))):
        status, answer = ask(app, "POST", "/windows", {"steps": 1})
        assert status == 503
        assert answer["error"] == "The session was not started, or its config disables it."
    with session:
        app = profiler_app(session)
        window = post(app, steps=1)
    assert state(app, window) == "failed"
    assert ask(app, "POST", "/windows", {"steps": 1})[0] == 503


def test_ranks_are_left_to_the_command(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, answer = ask(profiler_app(session), "POST", "/windows", {"steps": 1})
    assert (status, "instrument trigger" in answer["error"]) == (503, True)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b'{"steps": 0}', b'{"steps": 10001}', b'{"steps": true}', b'{"steps": "5"}',
        b'{"steps": 1, "seconds": 1}', b'{"steps": 1, "path": "/"}', b'{"seconds": 0}',
        b'{"seconds": 61}', b'{"seconds": 1e-320}', b'{"seconds": NaN}', b'{"seconds": -1}',
        b'{"steps": \xff}', b"[" * 900, b'{"steps": 1' + b" " * 2_000 + b"}",
        b'{"steps": 1}' + b" " * 988 + b"garbage",
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_in_one_sentence(session: Session, body: bytes) -> None:
    status, answer = ask(profiler_app(session), "POST", "/windows", body)
    assert status == 400
    assert answer["error"] == (
        'Send {"steps": 20} or {"seconds": 5}: 1 to 10000 steps, or 0.001 to 60 seconds.'
    )


def test_a_body_without_end_is_not_read_to_its_end(session: Session) -> None:
    app, read, sent = profiler_app(session), 0, []

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 100
        return {"type": "http.request", "body": b" " * 100, "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": "/windows", "server": HERE, "client": HERE}
    asyncio.run(app(scope | {"headers": [(b"host", b"localhost")]}, receive, send))
    assert (sent[0], read) == (400, 1_100)


@pytest.mark.parametrize(
    "request_line",
    [
        "GET /", "GET /windows", "PUT /windows", "POST /windows/x", "GET /elsewhere",
        "GET /windows/x/../../capture.json", "GET /windows/unknown", "GET /windows/unknown/report",
    ],
)  # fmt: skip
def test_anything_else_is_not_found(session: Session, request_line: str) -> None:
    assert ask(profiler_app(session), *request_line.split())[0] == 404


@pytest.mark.parametrize("path", ["/profiler/windows", "/windows"])
def test_the_place_of_the_mounted_app_is_no_part_of_its_paths(session: Session, path: str) -> None:
    """Starlette passes the whole path since 0.33, and passed the rest of the path before."""
    app = profiler_app(session)
    assert ask(app, "POST", path, {"steps": 1}, root_path="/profiler")[0] == 202


def test_a_lifespan_is_left_alone_and_a_websocket_is_closed(session: Session) -> None:
    """A handshake that nobody answers is an error in the server's log."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    for kind in ("lifespan", "websocket"):
        asyncio.run(profiler_app(session)({"type": kind}, None, send))
    assert sent == [{"type": "websocket.close"}]


@pytest.mark.parametrize(
    ("scope", "status"),
    [
        ({}, 404),
        ({"headers": {"host": "127.0.0.1"}}, 404),
        ({"headers": {"host": "[::1]:8000"}, "server": ("::1", 8000), "client": ("::1", 1)}, 404),
        ({"headers": {"origin": "http://localhost:8000"}}, 404),
        # a page of another site, or one of another port
        ({"headers": {"origin": "https://evil.example"}}, 403),
        ({"headers": {"origin": "http://localhost:9000"}}, 403),
        ({"headers": {"origin": "null"}}, 403),
        # a name that leads to 127.0.0.1 (DNS rebinding)
        ({"headers": {"host": "evil.example:8000"}}, 403),
        ({"headers": {"host": ""}}, 403),
        ({"headers": {"host": "[::1"}}, 403),
        ({"headers": {"host": "127.0.0.1.evil.example"}}, 403),
        # proxies
        ({"headers": {"x-forwarded-for": "127.0.0.1"}}, 403),
        ({"headers": {"forwarded": "for=192.0.2.7"}}, 403),
        ({"headers": {"via": "1.1 proxy"}}, 403),
        ({"headers": {"x-real-ip": "192.0.2.7"}}, 403),
        # other machines, Unix sockets
        ({"server": ELSEWHERE}, 403),
        ({"client": ELSEWHERE}, 403),
        ({"server": None, "client": None}, 403),
        ({"server": ("/run/server.sock", None), "client": None}, 403),
    ],
)
def test_without_token_only_localhost(session: Session, scope: dict[str, Any], status: int) -> None:
    assert ask(profiler_app(session), "GET", "/windows/x", **scope)[0] == status


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("Bearer sécret", 404),
        ("bearer sécret", 404),
        ("Bearer secret", 401),
        ("Bearer sécret2", 401),
        ("Bearer ", 401),
        ("Basic sécret", 401),
        ("sécret", 401),
        (None, 401),
    ],
)
def test_token_is_needed_if_set(session: Session, given: str | None, status: int) -> None:
    app = profiler_app(session, token="sécret")
    headers = {} if given is None else {"authorization": given}
    scope = {"server": ELSEWHERE, "client": ELSEWHERE, "headers": headers}
    found, body, answered = asyncio.run(asked(app, "GET", "/windows/x", **scope))
    assert (found, answered[b"www-authenticate"]) == (status, b"Bearer")
    assert "secret" not in body.decode()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_window_s": None}, "max_window_s=60 "),
        ({"max_window_s": 61}, "max_window_s=60 "),
        ({"max_window_memory": None}, "max_window_memory=1,000,000,000 at most"),
        ({"max_window_memory": "2GB"}, "max_window_memory=1,000,000,000 at most"),
        # the call that ends a window would wait for the diagnosis
        ({"export": "inline"}, "export=process"),
        # only the thread that began a window could end it
        ({"profile_all_threads": False}, "profile_all_threads=true"),
    ],
)
def test_a_session_without_the_bounds_is_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        profiler_app(Session("on_demand", **options))


@pytest.mark.parametrize("token", ["", b"secret", "secret\n", " secret", "se\udc80cret"])
def test_a_token_that_no_client_can_send_is_refused_and_not_shown(token: Any) -> None:
    with pytest.raises(ConfigError, match="token of profiler_app must be") as refused:
        profiler_app(Session("on_demand"), token=token)
    assert "cret" not in str(refused.value)


def test_without_the_sink_there_is_neither_diagnosis_nor_page(tmp_path: Path) -> None:
    for sinks in ({}, {"report": {"redact": True}}):
        with on_demand(tmp_path, sinks=sinks) as session:
            app = profiler_app(session)
            window = post(app, steps=1)
            for _ in range(3):
                session.step()
            assert ask(app, "GET", f"/windows/{window}")[1]["diagnosis"] is None
        status = asyncio.run(asked(app, "GET", f"/windows/{window}/report"))[0]
        assert status == (200 if sinks else 404)


def test_endpoint_calls_are_steps(tmp_path: Path, log: Log) -> None:
    log.expect("ended early, after 4 steps (the run ended)")
    session = on_demand(tmp_path)
    app = profiler_app(session)

    @profiled("model")
    def model() -> float:
        return float(torch.ones(2).sum())

    @session.record
    def plain() -> float:
        return model()

    @session.record
    async def coroutine() -> float:
        await asyncio.sleep(0)
        return model()

    async def serve(*wanted: Any) -> list[str]:
        states = []
        for each in wanted:
            _, body, _ = await asked(app, "POST", "/windows", json.dumps(each).encode())
            for _ in range(3):
                assert await asyncio.gather(coroutine(), asyncio.to_thread(plain)) == [2.0, 2.0]
            answer = (await asked(app, "GET", f"/windows/{json.loads(body)['id']}"))[1]
            states.append(json.loads(answer)["state"])
        return states

    assert plain() == 2.0
    assert asyncio.run(serve({"steps": 2}, {"seconds": 60})) == ["done", "recording"]
    assert session.running, "a window that ends by time does not end with the first call"
    session.stop()
    for capture in session.captures:
        assert {"plain", "coroutine", "model"} >= {
            row.name.rpartition(".")[2] for row in capture.ranges
        }


def test_nobody_waits_for_a_thread_that_begins_or_ends_a_window(session: Session) -> None:
    """Else many clients that ask for a state could use up the threads of the event loop."""
    app, held, asked_all = profiler_app(session), Event(), Event()
    window = post(app, steps=1)

    def hold() -> None:
        with session._loop.lock:
            held.set()
            assert asked_all.wait(120)

    thread = Thread(target=hold)
    thread.start()
    held.wait(120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instrument.record.step_loop._WAIT_S", 120.0)
        assert state(app, window) == "waiting"
        assert ask(app, "POST", "/windows", {"steps": 1})[0] == 409
        assert thread.is_alive()
    asked_all.set()
    thread.join()


def test_files_are_read_off_the_loop(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    app, others_ran, read = profiler_app(session), Event(), files.read_bytes
    window = post(app, steps=1)
    for _ in range(3):
        session.step()

    def slowly(path: Path) -> bytes:
        assert others_ran.wait(120)
        return read(path)

    async def others() -> None:
        others_ran.set()

    async def together() -> Any:
        return (await asyncio.gather(asked(app, "GET", f"/windows/{window}"), others()))[0]

    monkeypatch.setattr(files, "read_bytes", slowly)
    assert asyncio.run(together())[0] == 200
