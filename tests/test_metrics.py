"""`profiler.metrics` over real HTTP: what is exported against the test's own counts, and collectors that do not work."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import socket
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import requests
from collected import Log
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import context
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from test_timings import Clock
from test_timings import clock as clock
from waits import end_of_thread, until

from instrument import ProfilerConfig, Session, Trigger, profiled
from instrument.base.errors import ConfigError, MissingPackage
from instrument.base.rank_info import RankInfo
from instrument.record import metrics, session
from instrument.record.metrics import RangeSeries
from instrument.record.timings import OTHERS, DurationHistogram, Row, Rows

PULLED = {"prometheus_port": 0}
PUSHED = {"otlp": True, "every_s": 3600}
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
Key = tuple[str, frozenset[tuple[str, str]]]


class Every(Trigger):
    steps: int = 4

    def fires(self, step: Any) -> str | None:
        return "it is time" if step.number % self.steps == self.steps - 1 else None


def running(folder: Path, to: dict[str, Any], **options: Any) -> Session:
    return Session("timings", metrics=to, output_dir=str(folder), export="inline", **options)


def address(log: Log) -> str:
    """The last one that the log names."""
    found = [line.split()[-1] for line in log if "Metrics for Prometheus" in line]
    return found[-1]


def fetched(url: str, headers: dict[str, str] = OPENMETRICS) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        return str(answer.read().decode())


class Scrape:
    """What a scrape has: values by name and labels, without those that all series have, and exemplars."""

    def __init__(self, text: str) -> None:
        self.values: dict[Key, float] = {}
        self.exemplars: dict[str, dict[str, str]] = {}
        self.common: dict[str, str] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = dict(sample.labels)
                self.common = {
                    name: labels.pop(name) for name in ("rank", "world_size", "run", "host")
                }
                self.values[sample.name, frozenset(labels.items())] = sample.value
                if sample.exemplar is not None:
                    self.exemplars[labels["trigger"]] = sample.exemplar.labels

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[f"instrument_{name}", frozenset(labels.items())]

    def buckets(self) -> dict[float, float]:
        return {
            float(dict(labels)["le"]): value
            for (name, labels), value in self.values.items()
            if name == "instrument_step_duration_seconds_bucket"
        }


class Receiver:
    """A collector that keeps what it is sent, and answers with `status`, or never before `close`.

    An `endless` answer begins, and does not end before `close`.
    """

    def __init__(self, status: int | None = 200, endless: bool = False) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.enough = threading.Event()
        self.over = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportMetricsServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.requests.append(request)
                receiver.headers.append({"path": self.path, **dict(self.headers)})
                if len(receiver.requests) > 2:
                    receiver.enough.set()
                if status is None:
                    receiver.over.wait()
                self.send_response(status or 200)
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:1/login")
                if endless:
                    self.send_header("Content-Length", str(10**11))
                self.end_headers()
                if endless:
                    self.wfile.write(b"x")
                    receiver.over.wait()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []

    def make(status: int | None = 200, endless: bool = False) -> Receiver:
        made.append(Receiver(status, endless))
        port = made[-1].server.server_port
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        return made[-1]

    yield make
    for each in made:
        each.close()
    end_of_thread("instrument metrics")


def points(request: ExportMetricsServiceRequest) -> dict[str, dict[str, Any]]:
    """The data points by metric, and by range or trigger."""
    ((scope,),) = [each.scope_metrics for each in request.resource_metrics]
    found: dict[str, dict[str, Any]] = {}
    for metric in scope.metrics:
        data = metric.sum if metric.HasField("sum") else metric.histogram
        assert data.aggregation_temporality == 2  # cumulative
        found[f"{metric.name} {metric.unit}"] = {
            "".join(each.value.string_value for each in point.attributes): point
            for point in data.data_points
        }
    return found


# What is exported

STEPS_NS = [5, 101_812, 101_813, 2_000_000, 2_745_378, 44_000_000, 10**12, 44_000_000]


def work(session: Session, clock: Clock, steps: list[int] = STEPS_NS) -> None:
    """Steps of these durations, each with a call of `forward` of a third, and two of `data` of 1 ns."""
    for ns in steps:
        with profiled("forward"):
            clock.passes(ns // 3)
        for _ in range(2):
            with profiled("data"):
                clock.passes(1)
        clock.passes(ns - ns // 3 - 2)
        session.step()


def test_prometheus_gets_what_the_test_counts(tmp_path: Path, clock: Clock, log: Log) -> None:
    with running(tmp_path, PULLED, timings={"every": 3}) as session:
        before = Scrape(fetched(address(log)))
        assert set(before.buckets().values()) == {0}
        work(session, clock)
        scrape = Scrape(fetched(address(log)))
        text = fetched(address(log), {})
    buckets = scrape.buckets()
    assert len(buckets) == 32
    for bound, count in buckets.items():
        assert count == sum(ns <= round(bound * 1e9, 3) for ns in STEPS_NS), bound
    assert buckets[0.000101812] == 2
    assert scrape("step_duration_seconds_count") == len(STEPS_NS)
    assert scrape("step_duration_seconds_sum") == pytest.approx(sum(STEPS_NS) / 1e9, rel=1e-12)
    assert scrape("range_duration_seconds_count", range="data") == 2 * len(STEPS_NS)
    assert scrape("range_duration_seconds_sum", range="data") == 2 * len(STEPS_NS) / 1e9
    thirds = sum(ns // 3 for ns in STEPS_NS) / 1e9
    assert scrape("range_duration_seconds_sum", range="forward") == thirds
    assert scrape("range_duration_seconds_count", range=OTHERS) == 0
    known = {"rank": "0", "world_size": "1", "host": socket.gethostname()}
    assert scrape.common == {**known, "run": str(tmp_path)}
    # the older format, without exemplars
    assert "# TYPE instrument_windows_recorded_total counter" in text
    assert "# EOF" not in text


def test_names_come_back_as_they_were_given(tmp_path: Path, log: Log) -> None:
    name = 'größe "x"\n\\{le="1"} \udcff'
    with running(tmp_path, PULLED) as session:
        with profiled(name):
            pass
        session.step()
        scrape = Scrape(fetched(address(log)))
    given_back = name.replace("\udcff", "\\udcff")
    assert scrape("range_duration_seconds_count", range=given_back) == 1


def test_counters_of_a_run(tmp_path: Path, log: Log, receiver: Callable[..., Receiver]) -> None:
    collector = receiver()
    triggers = {"mine": Every(cooldown=0, max_windows=None), "never": Every(steps=1000)}
    options = {"at_steps": [1, 6], "active": 1, "sinks": [], "triggers": triggers}
    with running(tmp_path, {**PULLED, **PUSHED}, **options) as session:
        before = Scrape(fetched(address(log)))
        for _ in range(10):
            session.step()
        scrape = Scrape(fetched(address(log)))
    for name in ("windows_recorded_total", "triggers_fired_total"):
        assert before(name, trigger="mine") == scrape(name, trigger="never") == 0
    names = [capture.name for capture in session.captures]
    assert scrape("windows_recorded_total", trigger="(schedule)") == 2
    assert scrape("windows_recorded_total", trigger="mine") == 2
    assert scrape("triggers_fired_total", trigger="mine") == 2
    assert len(names) == 4
    folders = {trigger: labels["capture"] for trigger, labels in scrape.exemplars.items()}
    assert folders.keys() == {"(schedule)", "mine"}
    sent = points(collector.requests[-1])
    windows = sent["instrument.windows.recorded {window}"]
    assert windows["mine"].as_int == sent["instrument.triggers.fired {window}"]["mine"].as_int == 2
    ((path,),) = [each.filtered_attributes for each in windows["(schedule)"].exemplars]
    assert path.value.string_value == folders["(schedule)"] or len(str(tmp_path)) > 80
    assert Path(path.value.string_value).name == "steps_000006-000006_rank0"
    assert Path(path.value.string_value).is_dir()


def test_a_long_path_is_cut_to_what_prometheus_takes(tmp_path: Path, log: Log) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    with running(folder, PULLED, at_steps=[0], active=1, sinks=[]) as session:
        session.step()
        labels = Scrape(fetched(address(log))).exemplars["(schedule)"]
    assert sum(len(name) + len(value) for name, value in labels.items()) == 128
    (capture,) = session.captures
    assert str(capture.folder).endswith(labels["capture"])


def test_otlp_sends_what_the_test_counts(
    tmp_path: Path, clock: Clock, receiver: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=vision")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=lm,cluster=b")
    monkeypatch.setattr(session, "rank_info", lambda: RankInfo(3, 8, 1))
    with running(tmp_path, PUSHED, ranks=[3]) as running_session:
        work(running_session, clock)
    (request,), (headers,) = collector.requests, collector.headers
    assert headers["path"] == "/v1/metrics"
    assert headers["x-team"] == "vision"
    sent = points(request)
    step = sent["instrument.step.duration s"][""]
    assert step.count == sum(step.bucket_counts) == len(STEPS_NS)
    assert step.sum == sum(STEPS_NS) / 1e9
    assert step.start_time_unix_nano < step.time_unix_nano
    edges = [0, *step.explicit_bounds, float("inf")]
    for low, high, count in zip(edges, edges[1:], step.bucket_counts):
        assert count == sum(low * 1e9 < ns <= round(high * 1e9, 3) for ns in STEPS_NS), high
    ranges = sent["instrument.range.duration s"]
    assert {name: (each.count, each.sum) for name, each in ranges.items()} == {
        "forward": (len(STEPS_NS), sum(ns // 3 for ns in STEPS_NS) / 1e9),
        "data": (2 * len(STEPS_NS), 2 * len(STEPS_NS) / 1e9),
        OTHERS: (0, 0),
    }
    (resource,) = [each.resource for each in request.resource_metrics]
    assert {
        each.key: each.value.string_value or each.value.int_value for each in resource.attributes
    } == {
        "service.name": "lm",
        "cluster": "b",
        "host.name": socket.gethostname(),
        "instrument.rank": 3,
        "instrument.world_size": 8,
        "instrument.run": str(tmp_path),
    }


# Figures never fall

ADDED = st.lists(st.dictionaries(st.integers(0, 59), st.integers(1, 50), max_size=40), max_size=12)


@given(ADDED)
def test_no_series_of_a_range_falls_or_ends(added: list[dict[int, int]]) -> None:
    series, last = RangeSeries(), dict[str, tuple[int, int]]()
    totals: dict[str, Any] = defaultdict(lambda: metrics.np.zeros(2, metrics.np.int64))
    for calls in added:
        for number, ns in calls.items():
            name = f"range {number}" if number else OTHERS
            totals[name] = totals[name] + [1, ns]
        now = {each.key: (each.calls, each.total_ns) for each in series.points(dict(totals))}
        for name, before in last.items():
            assert now[name] >= before
            assert now[name][1] >= before[1]
        assert len(now) <= 41
        everything = sum(totals.values(), metrics.np.zeros(2, metrics.np.int64))
        assert [sum(each[at] for each in now.values()) for at in (0, 1)] == everything.tolist()
        costs = sorted((totals[name][1] for name in totals if name != OTHERS), reverse=True)
        least = costs[20] if len(costs) > 20 else 0  # a range that costs more is among the 20
        if len(now) < 41:
            assert {name for name in totals if totals[name][1] > least} - {OTHERS} <= now.keys()
        last = now


def test_a_range_that_becomes_costly_keeps_nothing_of_what_the_others_had() -> None:
    series, array = RangeSeries(), metrics.np.array
    many = {f"range {number}": array([1, 100]) for number in range(20)}
    first = {each.key: each for each in series.points(many | {"late": array([7, 50])})}
    then = {each.key: each for each in series.points(many | {"late": array([9, 1050])})}
    assert (first[OTHERS].calls, first[OTHERS].total_ns) == (7, 50)
    assert (then["late"].calls, then["late"].total_ns) == (2, 1000)
    assert (then[OTHERS].calls, then[OTHERS].total_ns) == (7, 50)
    assert len(then) == 22


def test_figures_do_not_fall_while_other_threads_add_and_write() -> None:
    rows, over = Rows(), threading.Event()
    rows.add("range", 1)
    ((_, row),) = rows.items()

    def add() -> None:
        for number in range(20_000):
            rows.add("range", number)

    def write() -> None:
        while not over.is_set():
            row.take_recent()

    adding = [threading.Thread(target=add) for _ in range(2)]
    writing = threading.Thread(target=write)
    for thread in (*adding, writing):
        thread.start()
    seen = [DurationHistogram()]
    while any(thread.is_alive() for thread in adding):
        seen.append(row.histogram())
    over.set()
    writing.join()
    seen.append(row.histogram())
    for before, after in pairwise(seen):
        assert after.calls >= before.calls
        assert after.total_ns >= before.total_ns
        assert (after.bins >= before.bins).all()
    assert seen[-1].calls == 40_001 == seen[-1].bins.sum()


def test_what_is_written_stays_counted_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    row, locked = Row(), []
    row.uncounted = [1, 2]
    merge = DurationHistogram.merge

    def merging(whole: DurationHistogram, other: DurationHistogram) -> None:
        locked.append(row._counting.locked())
        merge(whole, other)

    monkeypatch.setattr(DurationHistogram, "merge", merging)
    row.take_recent()
    assert row.histogram().calls == 2
    assert locked == [True] * 3


# Collectors and ports that do not work


class Hurried(threading.Event):
    """An event whose timeouts end a thousand times as soon."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout and timeout / 1000)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "Event", Hurried)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, hurried: None) -> threading.Event:
    """Set when an export fails; the end of the run does not wait."""
    event, warn = threading.Event(), metrics.Metrics._warn

    def warned(self: metrics.Metrics, reason: str) -> bool:
        answer = warn(self, reason)
        event.set()
        return answer

    monkeypatch.setattr(metrics.Metrics, "_warn", warned)
    monkeypatch.setattr(metrics, "_LAST_PUSH_S", 0.01)
    return event


OFTEN = {"otlp": True, "every_s": 10}


@pytest.fixture
def logged_by_others(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches the standard library's log."""
    messages: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: messages.append(record.getMessage()))
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers, handler])
    return messages


def refusals(log: Log) -> list[str]:
    return [line for line in log.at("WARNING") if "not sent by OTLP" in line]


def trained(folder: Path, to: dict[str, Any], until_: Callable[[], Any] = lambda: None) -> None:
    """A run whose timings are whole, however the collector behaves."""
    with running(folder, to, timings={"every": 1}) as session:
        for _ in range(3):
            session.step()
        until_()
    assert len((folder / "timings_rank0.jsonl").read_text().splitlines()) == 3


@pytest.mark.usefixtures("hurried")
def test_a_collector_that_fails_costs_one_warning(
    tmp_path: Path, log: Log, receiver: Callable[..., Receiver], logged_by_others: list[str]
) -> None:
    collector = receiver(500)
    trained(tmp_path, OFTEN, collector.enough.wait)
    (warning,) = refusals(log)
    assert "500" in warning
    assert "Internal Server Error" in warning
    assert logged_by_others == []


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("status", [429, None], ids=["too many requests", "hangs"])
def test_a_collector_that_refuses_or_hangs_costs_one_warning(
    tmp_path: Path,
    log: Log,
    receiver: Callable[..., Receiver],
    monkeypatch: pytest.MonkeyPatch,
    status: int | None,
) -> None:
    monkeypatch.setattr(metrics, "_LAST_PUSH_S", 0.01)  # the end of the run does not wait longer
    collector = receiver(status)
    trained(tmp_path, OFTEN, lambda: until(lambda: collector.requests))
    collector.over.set()
    end_of_thread("instrument metrics")
    assert len(refusals(log)) == 1


def test_a_port_without_a_collector_costs_one_warning(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, failing: threading.Event
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://127.0.0.1:{port}/v1/metrics")
    trained(tmp_path, OFTEN, failing.wait)
    end_of_thread("instrument metrics")
    (warning,) = refusals(log)
    assert os.strerror(errno.ECONNREFUSED) in warning


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_does_not_end_is_not_read(
    tmp_path: Path, log: Log, receiver: Callable[..., Receiver], status: int
) -> None:
    receiver(status, endless=True)
    trained(tmp_path, PUSHED)
    assert ["no answer" in line for line in refusals(log)] == [False] * (status > 200)


def test_redirect_is_refused(tmp_path: Path, log: Log, receiver: Callable[..., Receiver]) -> None:
    receiver(302)
    trained(tmp_path, PUSHED)
    (warning,) = refusals(log)
    assert "redirects to another address (302)" in warning


@pytest.mark.parametrize(
    "endpoint", ["http://user:PASS4WORD@127.0.0.1:1/?api_key=KEY4U", "nourl?api_key=KEY4U"]
)
def test_no_secret_of_the_endpoint_is_logged(
    tmp_path: Path,
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
    failing: threading.Event,
    endpoint: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
    trained(tmp_path, OFTEN, failing.wait)
    end_of_thread("instrument metrics")
    (warning,) = refusals(log)
    assert "api_key=***" in warning
    assert "PASS4WORD" not in warning
    assert "KEY4U" not in warning


def test_no_header_that_cannot_be_sent_is_logged(
    tmp_path: Path, log: Log, receiver: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=KEY4U%0Ax")
    trained(tmp_path, PUSHED)
    (warning,) = refusals(log)
    assert "header value: ***." in warning


def test_instrumentation_of_the_program_does_not_see_our_requests(
    tmp_path: Path, receiver: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver()
    send, suppressed = requests.Session.send, []

    def sending(self: requests.Session, *args: Any, **options: Any) -> requests.Response:
        suppressed.append(context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY))
        return send(self, *args, **options)

    monkeypatch.setattr(requests.Session, "send", sending)
    trained(tmp_path, PUSHED)
    assert suppressed == [True]
    assert context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY) is None


def test_ctrl_c_at_last_export(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = metrics.Metrics.stop

    def interrupted(self: metrics.Metrics) -> None:
        stop(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics.Metrics, "stop", interrupted)
    session = running(tmp_path, PULLED, at_steps=[0], active=1, sinks=[])
    session.start()
    session.step()
    with pytest.raises(KeyboardInterrupt):
        session.stop()
    assert not session.running
    monkeypatch.undo()
    session.start()
    session.step()
    session.stop()
    assert log.at("ERROR") == []


def test_what_others_log_through_the_exporter_is_logged(
    tmp_path: Path, receiver: Callable[..., Receiver], logged_by_others: list[str]
) -> None:
    receiver()
    exporter = logging.getLogger("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    with running(tmp_path, PUSHED) as session:
        exporter.warning("of another")
        session.step()
    assert logged_by_others == ["of another"]
    assert exporter.filters == []


def test_a_port_that_is_taken_costs_one_warning(tmp_path: Path, log: Log) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        trained(tmp_path, {"prometheus_port": port})
    (warning,) = log.at("WARNING")
    assert warning.startswith(f"Prometheus gets no metrics of rank 0: port {port} of 127.0.0.1 ")
    assert os.strerror(errno.EADDRINUSE) in warning


@pytest.mark.parametrize(
    ("host", "port", "local_rank"), [("127.0.0.1", 65_535, 2), ("no such host..", 0, 0)]
)
def test_a_port_that_cannot_be_costs_one_warning(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, host: str, port: int, local_rank: int
) -> None:
    monkeypatch.setattr(session, "rank_info", lambda: RankInfo(0, 4, local_rank))
    trained(tmp_path, {"prometheus_port": port, "prometheus_host": host})
    (warning,) = log.at("WARNING")
    assert f"port {port + local_rank} of {host} cannot be used" in warning


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_an_address_of_ipv6_is_a_link(tmp_path: Path, log: Log) -> None:
    with running(tmp_path, PULLED | {"prometheus_host": "::1"}):
        assert address(log).startswith("http://[::1]:")
        assert "instrument" in fetched(address(log))


def test_client_that_leaves(tmp_path: Path, log: Log, capfd: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, PULLED) as session:
        host, port = address(log).removeprefix("http://").split(":")
        for said in (b"", b"GET /metrics HTTP/1.1\r\n", b"nonsense\r\n\r\n"):
            with socket.create_connection((host, int(port))) as connection:
                linger = b"\1\0\0\0\0\0\0\0"  # the connection is reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                connection.sendall(said)
        fetched(address(log))
        session.step()
    until(lambda: not any("process_request_thread" in each.name for each in threading.enumerate()))
    assert "Traceback" not in capfd.readouterr().err


def test_no_name_lookup(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(socket, "gethostbyaddr", asked.append)  # may take seconds
    with running(tmp_path, PULLED):
        assert Scrape(fetched(address(log))).common["rank"] == "0"
    assert asked == []


def connected(log: Log) -> socket.socket:
    """A client that is silent."""
    host, port = address(log).removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_silent_clients(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_SILENT_S", 0.01)
    with running(tmp_path, PULLED), connected(log) as client:
        assert client.recv(1) == b""


# Ranks, sessions and processes


def test_port_of_local_ranks(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(session, "rank_info", lambda: RankInfo(11, 16, 3))
    with running(tmp_path, {"prometheus_port": port - 3}, ranks=[11]):
        found = fetched(f"http://127.0.0.1:{port}")
    assert Scrape(found).common["rank"] == "11"


def test_sessions_at_the_same_time_export_their_own(tmp_path: Path, log: Log) -> None:
    with running(tmp_path / "a", PULLED) as one:
        first = address(log)
        one.step()
        with running(tmp_path / "b", PULLED) as other:
            other.step()
            other.step()
            texts = [fetched(first), fetched(address(log))]
    one_, other_ = map(Scrape, texts)
    assert one_.common["run"] == str(tmp_path / "a")
    assert other_.common["run"] == str(tmp_path / "b")
    assert one_("step_duration_seconds_count") == 1
    assert other_("step_duration_seconds_count") == 2


def _listening(port: int) -> Iterator[int]:
    """The file descriptors of this process that keep the port."""
    for number in [int(each.name) for each in Path("/dev/fd").iterdir()]:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as each:
            listens = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and each.getsockname()[1] == port:
                yield number


def _idle(port: int, began: Any, may_end: Any, answers: Any) -> None:
    listening = list(_listening(port))
    began.set()
    may_end.wait()
    names = {each.name for each in threading.enumerate()}
    answers.put(("instrument metrics" in names, listening))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child(tmp_path: Path, log: Log, receiver: Callable[..., Receiver]) -> None:
    collector, context = receiver(), multiprocessing.get_context("fork")
    began, may_end, answers = context.Event(), context.Event(), context.SimpleQueue()
    with running(tmp_path, {**PULLED, **PUSHED}) as session:
        session.step()
        port = int(address(log).rpartition(":")[2])
        assert len(list(_listening(port))) == 1
        child = context.Process(target=_idle, args=(port, began, may_end, answers))
        child.start()
        began.wait()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with running(tmp_path, {"prometheus_port": port}) as session:  # while the child lives
        assert Scrape(fetched(f"http://127.0.0.1:{port}")).common["rank"] == "0"
    may_end.set()
    assert answers.get() == (False, [])
    child.join()
    assert child.exitcode == 0
    assert len(collector.requests) == 1


def test_without_metrics_no_package_is_loaded_and_no_thread_runs(tmp_path: Path) -> None:
    before = threading.active_count()
    with Session("timings", output_dir=str(tmp_path)) as session:
        session.step()
        assert threading.active_count() == before


# Options


def test_options_that_cannot_work_get_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for every_s in (0.01, 1e12):
        with pytest.raises(ConfigError, match=r"^profiler\.metrics\.every_s .* (0.1|3600)"):
            ProfilerConfig(timings={}, metrics={"otlp": True, "every_s": every_s})
    needs = "profiler.metrics needs profiler.timings={}, and prometheus_port or otlp=true."
    for options in ({"metrics": {"otlp": True}}, {"metrics": {}, "timings": {}}):
        with pytest.raises(ConfigError) as raised:
            ProfilerConfig(**options)
        assert str(raised.value) == needs

    def not_found(name: str) -> None:  # as `find_spec` does, if not even the package above is there
        if "." in name:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr("instrument.base.errors.find_spec", not_found)
    for option, value, package, extra in (
        ("prometheus_port", 9400, "prometheus_client", "prometheus"),
        ("otlp", True, "opentelemetry.exporter.otlp.proto.http", "otlp"),
    ):
        with pytest.raises(MissingPackage) as missing:
            ProfilerConfig(timings={}, metrics={option: value})
        install = f"pip install 'torch-instrument[{extra}]'."
        assert str(missing.value) == (
            f"profiler.metrics.{option} needs the package {package}: {install}"
        )


def test_refused_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "none such, key=K4U")
    with pytest.raises(
        ConfigError, match=r"^The OTLP exporter refuses a variable: .*none such, key=\*\*\*"
    ):
        running(tmp_path, PUSHED).start()
