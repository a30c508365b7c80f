"""Exports the timings and the windows of a run while it runs, to Prometheus and by OTLP."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from heapq import nlargest
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

import numpy as np

from instrument.base import threads
from instrument.base.errors import ConfigError, reason_of
from instrument.base.log import logger
from instrument.base.range_names import STEP, from_trace, whole
from instrument.base.rank_info import RankInfo
from instrument.base.redact import redact
from instrument.record.config.schema import ProfilerConfig
from instrument.record.timings import GROWTH, OTHERS, DurationHistogram, Timings

_SCHEDULE = "(schedule)"  # in place of a trigger's name
# How many of the costliest ranges have a series of their own, and how many during a whole run.
_COSTLIEST, _MOST_RANGES = 20, 40
# Buckets end where bins of `DurationHistogram` begin, so that their counts are exact.
_BINS = np.arange(294, 655, 12)
#: The bounds of the buckets of steps: 0.1 ms to 138 s, each 1.6 times the bound before.
BOUNDS_S = [int(GROWTH**first) / 1e9 for first in _BINS.tolist()]
_LONGEST = 128 - len("capture")  # OpenMetrics limits the labels of an exemplar
_LAST_PUSH_S, _SILENT_S = 2.0, 5  # how long the run's end waits, and a server for its client
_PROVIDER = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_{}CREDENTIAL_PROVIDER"


class Point(NamedTuple):
    """One series: `below` counts the calls up to each bound; `last` is a capture and its time."""

    key: str
    calls: int = 0
    total_ns: int = 0
    below: Sequence[int] = ()
    last: tuple[str, int] | None = None


class RangeSeries:
    """A series for each range that was once among the 20 costliest, at most 40; one for the others.

    No series ends, and no figure falls: calls that counted as those of others stay there.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}  # by series: what stays with the others
        self._last: dict[str, Any] = {}

    def points(self, totals: dict[str, Any]) -> list[Point]:
        """The series of ranges with these arrays of calls and ns."""
        names, zero = [name for name in totals if name != OTHERS], np.zeros(2, np.int64)
        for name in nlargest(_COSTLIEST, names, key=lambda name: totals[name][1]):
            if name not in self._before and len(self._before) < _MOST_RANGES:
                self._before[name] = self._last.get(name, zero)
        self._last = totals
        own = {name: totals[name] - before for name, before in self._before.items()}
        own[OTHERS] = sum(totals.values(), zero) - sum(own.values(), zero)
        return [Point(from_trace(name), *each.tolist()) for name, each in own.items()]


class Metrics:
    """Exports `timings` and the windows of the run in the folder `run`; a step costs nothing."""

    def __init__(self, config: ProfilerConfig, timings: Timings, rank: RankInfo, run: Path) -> None:
        assert config.metrics is not None
        self._config, self._timings, self._rank = config.metrics, timings, rank
        self._about: dict[str, Any] = {"rank": rank.rank, "world_size": rank.world_size}
        self._about |= {"run": whole(str(run)), "host": socket.gethostname()}
        self.fired = {name: Point(whole(name)) for name in config.triggers}
        self.recorded = {_SCHEDULE: Point(_SCHEDULE), **self.fired}
        self._ranges = {prefix: RangeSeries() for prefix, _ in timings.rows_by_prefix()}
        self._exporting, self._over, self._began_ns = Lock(), Event(), time.time_ns()
        self._server: Any = None
        self._warned = False
        self._thread = Thread(target=self._push, name="instrument metrics", daemon=True)
        otlp: tuple[Any, Any] = _otlp(self._about) if self._config.otlp else (None, None)
        self._exporter, self._resource = otlp

    def start(self) -> None:
        """Serve the metrics to Prometheus, and start to send them by OTLP."""
        if self._config.prometheus_port is not None:
            self._serve(self._config.prometheus_port)
        if self._exporter is not None:
            threads.start(self._thread, "no metrics are sent by OTLP")

    def stop(self) -> None:
        """Serve no more, and send the last metrics, for which this waits at most two seconds."""
        self._over.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread.ident is not None:
            self._thread.join(_LAST_PUSH_S)
            if self._thread.is_alive():
                self._warn(f"no answer within {_LAST_PUSH_S:g} s at the end of the run")
            self._exporter.shutdown()

    def leave_to_parent(self) -> None:
        """In a forked child: do not keep the port, which would outlive the parent."""
        if self._server is not None:
            self._server.socket.close()

    def count(self, windows: dict[str, Point], by: str | None, capture: Path | None = None) -> None:
        """Count a window of a trigger in `fired` or `recorded`; it becomes the folder `capture`."""
        before = windows.get(trigger := by or _SCHEDULE) or Point(whole(trigger))
        last = None if capture is None else (whole(str(capture)), time.time_ns())
        windows[trigger] = before._replace(calls=before.calls + 1, last=last)

    def _families(self) -> Iterator[tuple[str, str, str, list[Point]]]:
        """Name, description, label ("range", "trigger" or "") and points of each metric."""
        for prefix, rows in self._timings.rows_by_prefix():
            with self._exporting:
                all_ = {name: row.histogram() for name, row in rows.items()}
                steps = all_.pop(STEP, DurationHistogram())
                totals = {n: np.array([each.calls, each.total_ns]) for n, each in all_.items()}
                ranges = self._ranges[prefix].points(totals)
            step = Point("", steps.calls, steps.total_ns, np.cumsum(steps.bins)[_BINS - 1].tolist())
            where = "on the device" if prefix else "on the CPU"
            yield f"step.{prefix}duration", f"Duration of a training step {where}", "", [step]
            yield f"range.{prefix}duration", f"Duration of a range {where}", "range", ranges
        yield "windows.recorded", "Windows recorded", "trigger", list(self.recorded.values())
        if self.fired:
            yield "triggers.fired", "Windows by triggers", "trigger", list(self.fired.values())

    def _serve(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, MetricsHandler

        registry = CollectorRegistry()
        registry.register(self)
        handler = type("", (MetricsHandler,), {"registry": registry, "timeout": _SILENT_S})
        host, port = self._config.prometheus_host, port and port + self._rank.local_rank
        # no HTTPServer, which asks DNS for the host's name, maybe for seconds
        options: dict[str, Any] = {"allow_reuse_address": True, "daemon_threads": True}
        options["address_family"] = socket.AF_INET6 if ":" in host else socket.AF_INET
        options["handle_error"] = lambda *_: None  # it prints a traceback if a client leaves
        try:
            server: Any = type("", (ThreadingTCPServer,), options)((host, port), handler)
            Thread(target=server.serve_forever, daemon=True).start()
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            text = "Prometheus gets no metrics of rank {}: port {} of {} cannot be used ({})."
            logger.warning(text, self._rank.rank, port, host, reason_of(error))
        else:
            self._server = server
            shown = f"[{host}]" if ":" in host else host
            logger.info("Metrics for Prometheus: http://{}:{}", shown, server.server_address[1])

    def collect(self) -> Iterator[Any]:
        """Yield all metrics; Prometheus's client calls this for each request, on another thread."""
        from prometheus_client import core
        from prometheus_client.samples import Exemplar

        bounds = [*map(str, BOUNDS_S), "+Inf"]
        kinds: dict[str, Any] = {"trigger": core.CounterMetricFamily}
        kinds |= {"range": core.SummaryMetricFamily, "": core.HistogramMetricFamily}
        for name, about, label, points in self._families():
            unit = "" if label == "trigger" else "seconds"
            labels = [*self._about, *filter(None, [label])]
            name = f"instrument_{name.replace('.', '_')}"
            family = kinds[label](name, about, labels=labels, unit=unit)
            for key, calls, ns, below, last in points:
                values = [*map(str, self._about.values()), key]
                if label == "trigger":
                    exemplar = last and Exemplar({"capture": last[0][-_LONGEST:]}, 1, last[1] / 1e9)
                    family.add_metric(values, calls, exemplar=exemplar)
                else:
                    count = list(zip(bounds, [*below, calls])) if below else calls
                    family.add_metric(values, count, ns / 1e9)
            yield family

    def _push(self) -> None:
        from opentelemetry import context

        # so that instrumentation of the program does not trace our requests
        context.attach(context.set_value(context._SUPPRESS_INSTRUMENTATION_KEY, True))
        exporter_log, over = logging.getLogger(type(self._exporter).__module__), False

        def is_of_others(record: logging.LogRecord) -> bool:  # the exporter logs each failure
            return record.thread != self._thread.ident or self._warn(record.getMessage())

        exporter_log.addFilter(is_of_others)
        # ranks that start together do not send together
        pause_s = self._config.every_s * (1 - self._rank.rank * 0.618 % 1)
        while not over:
            over, pause_s = self._over.wait(pause_s), self._config.every_s
            try:
                self._exporter.export(self._metrics_data())
            except Exception as error:
                self._warn(reason_of(error))
        exporter_log.removeFilter(is_of_others)

    def _warn(self, reason: str) -> bool:
        if not self._warned:
            self._warned = True
            text = "Metrics of rank {} were not sent by OTLP: {}. Further failures are not logged."
            logger.warning(text, self._rank.rank, redact(reason.rstrip(".")))
        return False

    def _metrics_data(self) -> Any:
        from opentelemetry.sdk.metrics import Exemplar, export
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        metrics, mode = [], export.AggregationTemporality.CUMULATIVE
        for name, about, label, points in self._families():
            data, is_sum = list[Any](), label == "trigger"
            for key, calls, ns, below, last in points:
                attributes: Any = {f"instrument.{label}": key} if label else {}
                common = attributes, self._began_ns, time.time_ns(), calls
                if is_sum:
                    found = [Exemplar({"instrument.capture": last[0]}, 1, last[1])] if last else []
                    data.append(export.NumberDataPoint(*common, found))
                else:
                    more: Any = [ns / 1e9, np.diff([0, *below, calls]).tolist()]
                    more += [BOUNDS_S[: len(below)], None, None]  # minimum and maximum: unknown
                    data.append(export.HistogramDataPoint(*common, *more))
            values: Any = export.Sum(data, mode, True) if is_sum else export.Histogram(data, mode)
            unit = "{window}" if is_sum else "s"
            metrics.append(export.Metric(f"instrument.{name}", about, unit, values))
        scope = export.ScopeMetrics(InstrumentationScope("instrument"), metrics, "")
        return export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])


def _otlp(about: dict[str, Any]) -> tuple[Any, Any]:
    """The SDK's exporter, and what identifies this process; OTEL_… variables take precedence."""
    import requests
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    def check(response: Any, **_: Any) -> None:
        response.close()  # unread, because it may not end
        if 300 <= response.status_code < 400:  # the exporter takes it for a success
            raise OSError(f"the collector redirects to another address ({response.status_code})")

    own = {f"instrument.{key}": value for key, value in about.items() if key != "host"}
    own |= {"service.name": "instrument", "host.name": about["host"]}
    session: Any = requests.Session()
    session.stream, session.hooks["response"] = True, check
    if any(os.environ.get(_PROVIDER.format(signal)) for signal in ("", "METRICS_")):
        session = None  # the program makes it
    try:
        exporter = OTLPMetricExporter(session=session)
        return exporter, Resource(own).merge(OTELResourceDetector().detect())
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"The OTLP exporter refuses a variable: {redact(str(error))}.") from None
