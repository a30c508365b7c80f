"""What exporting the timings of a run costs its steps, and how long one export takes; run by `make bench`."""

from __future__ import annotations

import http.server
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from threading import Thread

import torch
from loguru import logger
from prometheus_client import CollectorRegistry, generate_latest
from rounds import Row, report
from torch import nn

from instrument import Session, profiled
from instrument.base.rank_info import RankInfo
from instrument.record.config.schema import as_config
from instrument.record.metrics import Metrics
from instrument.record.timings import Timings

warnings.simplefilter("ignore")
EVERY_S, TIMES = 15, 30  # the default, and how many times as often is measured
TURNS, STEPS = 40, 400
GAP_NS = 20_000  # a thread that looks at the clock waits for another thread if it takes so long


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def serve(ports: multiprocessing.SimpleQueue[int]) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    ports.put(server.server_port)
    server.serve_forever()


def collector() -> int:
    """The port of a collector in a process of its own, so that its work does not hold our GIL."""
    context = multiprocessing.get_context("fork")
    ports = context.SimpleQueue()
    context.Process(target=serve, args=(ports,), daemon=True).start()
    return ports.get()


def step(layers: nn.ModuleList, x: torch.Tensor) -> None:
    """About a millisecond of work, in 24 ranges."""
    for number, layer in enumerate(layers):
        with profiled(f"layer {number}"):
            x = torch.relu(layer(x))
    with profiled("loss"):
        x.sum().backward()


def exporting(timings: Timings, every_s: float) -> Metrics:
    """Metrics that are sent to the collector every so many seconds."""
    metrics = Metrics(
        as_config("timings", metrics={"otlp": True, "every_s": every_s}),
        timings,
        RankInfo(0, 1, 0),
        Path("run"),
    )
    metrics.start()
    return metrics


def steps(timings: Timings, train: Callable[[], None]) -> list[Row]:
    """Blocks of steps with and without exports, in turns; the CPU time of the training thread.

    What else runs on the machine would cover a difference in seconds. What that difference can be at most, the rows of
    `exports` say: an export takes CPU time, with the GIL, on another thread.
    """
    cpu: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(TURNS):
        for with_metrics in (turn % 2 == 0, turn % 2 == 1):
            metrics = exporting(timings, EVERY_S / TIMES) if with_metrics else None
            began = time.thread_time_ns()
            for _ in range(STEPS):
                train()
            cpu[with_metrics].append((time.thread_time_ns() - began) / STEPS)
            if metrics is not None:
                metrics.stop()
    name = f"a step of {median(cpu[False]) / 1e6:.1f} ms, 24 ranges, {TIMES} times the rate"
    return [Row(name, median(cpu[True]), "without metrics", median(cpu[False]), 1.01)]


def exports(timings: Timings) -> list[Row]:
    """An export's own CPU time, and how long it keeps a thread that only looks at the clock from running."""
    metrics = exporting(timings, 3600)
    registry = CollectorRegistry()
    registry.register(metrics)
    forms: dict[str, Callable[[], object]] = {
        "Prometheus": lambda: generate_latest(registry),
        "OTLP": lambda: metrics._exporter.export(metrics._metrics_data()),
    }
    rows = []
    for name, export in forms.items():
        cpu, held = [], []

        def timed(export: Callable[[], object] = export, cpu: list[int] = cpu) -> None:
            began = time.thread_time_ns()
            export()
            cpu.append(time.thread_time_ns() - began)

        export()
        for _ in range(50):
            thread, lost, last = Thread(target=timed), 0, time.perf_counter_ns()
            thread.start()  # the first export may already be over when this returns
            while thread.is_alive() or not lost:
                now = time.perf_counter_ns()
                lost += now - last if now - last > GAP_NS else 0
                last = now
            thread.join()
            held.append(lost)
        share = EVERY_S * 1e9 / 1000
        rows += [
            Row(f"an export, {name}: CPU time", median(cpu), f"1/1000 of {EVERY_S} s", share, 1.0),
            Row(
                f"an export, {name}: other threads wait",
                sorted(held)[len(held) // 4],
                f"1/1000 of {EVERY_S} s",
                share,
                1.0,
            ),
        ]
    metrics.stop()
    return rows


def main() -> int:
    logger.disable("instrument")
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{collector()}"
    torch.set_num_threads(1)
    layers, x = nn.ModuleList(nn.Linear(48, 48) for _ in range(23)), torch.randn(8, 48)
    with Session("timings", timings={"every": 10**9}, output_dir=tempfile.mkdtemp()) as session:
        assert session.timings is not None

        def train() -> None:
            step(layers, x)
            session.step()

        for _ in range(1000):
            train()
        rows = [*steps(session.timings, train), *exports(session.timings)]
    title = f"Metrics: torch {torch.__version__}, Python {sys.version.split()[0]}"
    return 0 if report(title, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
