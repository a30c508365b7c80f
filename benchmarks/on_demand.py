"""What a window on request costs a server: latency before, while it is recorded, at its stop, during the export, after.

A uvicorn server with a synchronous and an asynchronous endpoint, and beside it the same server without a session; both
get the same requests at a fixed rate, in turns. The clients are processes of their own, and so is the exporter. On a
busy machine, latencies say little: the CPU time of the endpoint is compared too.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rounds import Row, report

SERVER = """
import socket
import sys
import time
from contextlib import asynccontextmanager

import torch
import uvicorn
from fastapi import FastAPI

from instrument import Session
from instrument.integrations.asgi import profiler_app

torch.set_num_threads(1)
layers = [torch.nn.Linear(512, 512) for _ in range(12)]
model = torch.nn.Sequential(*layers).eval()
session = Session("on_demand" if sys.argv[2] == "with" else None)


@asynccontextmanager
async def lifespan(app):
    with session:
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/profiler", profiler_app(session))
recorded = session.record if sys.argv[2] == "with" else lambda endpoint: endpoint


@recorded
def predict():
    with torch.inference_mode():
        return float(model(torch.ones(48, 512)).sum())


@recorded
async def predict_async():
    with torch.inference_mode():
        return float(model(torch.ones(48, 512)).sum())


@app.get("/sync")
def synchronous():
    began = time.thread_time()
    return {"sum": predict(), "cpu_s": time.thread_time() - began}


@app.get("/async")
async def asynchronous():
    began = time.thread_time()
    return {"sum": await predict_async(), "cpu_s": time.thread_time() - began}


listener = socket.socket(fileno=int(sys.argv[1]))
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
"""
ROUNDS, SECONDS, PAUSE_S, BEFORE_S = 5, 4, 0.04, 5.0
PHASES = ("before", "recording", "stop", "exporting", "after")
Answered = tuple[
    float, float, float
]  # when a request was sent, its latency, its CPU time, in seconds


def load(port: int, path: str, results: Any, over: Any) -> None:
    """Send a request every `PAUSE_S`, one after the other, and note each latency."""
    connection, found = http.client.HTTPConnection("127.0.0.1", port), []
    following = time.monotonic()
    while not over.is_set():
        time.sleep(max(0.0, following - time.monotonic()))
        began = time.monotonic()
        connection.request("GET", path)
        answer = json.loads(connection.getresponse().read())
        found.append((began, time.monotonic() - began, answer["cpu_s"]))
        following = max(following + PAUSE_S, time.monotonic())
    results.put(found)


class Load:
    """Two clients, one of each endpoint, in processes of their own; `answered` ends them."""

    def __init__(self, port: int) -> None:
        self.results, self.over = multiprocessing.Queue(), multiprocessing.Event()
        arguments = [(port, path, self.results, self.over) for path in ("/sync", "/async")]
        self.clients = [multiprocessing.Process(target=load, args=each) for each in arguments]
        for each in self.clients:
            each.start()

    def answered(self) -> list[Answered]:
        self.over.set()
        found = [each for _ in self.clients for each in self.results.get(timeout=60)]
        for each in self.clients:
            each.join()
        return found


def ask(port: int, method: str, path: str, body: str | None = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, f"/profiler{path}", body)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def windowed(port: int) -> dict[str, list[Answered]]:
    """The answers before, in and after one window, by phase."""
    clients = Load(port)
    time.sleep(BEFORE_S)
    marks = {"before": time.monotonic()}
    window = ask(port, "POST", "/windows", json.dumps({"seconds": SECONDS}))["id"]
    while (state := ask(port, "GET", f"/windows/{window}")["state"]) not in ("done", "failed"):
        marks[state] = time.monotonic()  # the last look that saw it
        time.sleep(0.02)
    assert state == "done"
    marks["done"] = time.monotonic()
    time.sleep(BEFORE_S)
    phases = {name: list[Answered]() for name in PHASES}
    for each in clients.answered():
        ended = each[0] + each[1]
        if ended < marks["before"]:
            name = "before"
        elif ended < marks["recording"]:
            name = "recording"
        elif each[0] < marks["recording"] + 0.1:
            name = "stop"
        else:
            name = "exporting" if each[0] < marks["done"] else "after"
        phases[name].append(each)
    return phases


def p(share: float, latencies: list[float]) -> float:
    return statistics.quantiles(latencies, n=1000, method="inclusive")[int(share * 1000) - 1]


def started(stack: ExitStack, folder: Path, kind: str) -> int:
    """Start a server; its port."""
    import socket

    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    (folder / "server.py").write_text(SERVER)
    command = [sys.executable, "server.py", str(listener.fileno()), kind]
    process = subprocess.Popen(command, cwd=folder, pass_fds=[listener.fileno()])
    stack.callback(process.wait, 60)
    stack.callback(process.send_signal, signal.SIGTERM)
    port = int(listener.getsockname()[1])
    for path in ("/sync", "/async"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET", path)
        assert connection.getresponse().status == 200
    return port


def main() -> int:
    phases: dict[str, list[Answered]] = {name: [] for name in (*PHASES, "without")}
    stalls = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bare, ours = (started(stack, Path(folder), kind) for kind in ("without", "with"))
        for _ in range(ROUNDS):
            clients = Load(bare)
            time.sleep(2 * BEFORE_S)
            phases["without"] += clients.answered()
            found = windowed(ours)
            stalls.append(max((each[1] for each in found["stop"]), default=0.0))
            for name, answers in found.items():
                phases[name] += answers
        files = Path(folder).glob("profile/*/capture.json")
        costs = [json.loads(path.read_text())["cost"] for path in files]
    outside = [each for name in ("recording", "exporting", "after") for each in phases[name]]
    rows = []
    for what, at in (("latency", 1), ("CPU time", 2)):
        print(f"\n{what}, {ROUNDS} windows of {SECONDS} s")
        for name, answers in (*phases.items(), ("outside", outside)):
            if name != "stop":
                p50, p99 = (p(share, [each[at] for each in answers]) * 1e3 for share in (0.5, 0.99))
                print(
                    f"{name:<10} {len(answers):>6} requests  p50 {p50:8.2f} ms  p99 {p99:8.2f} ms"
                )
        ours_ns, before_ns, without_ns = (
            p(0.99, [each[at] for each in answers]) * 1e9
            for answers in (outside, phases["before"], phases["without"])
        )
        rows += [
            Row(
                f"p99 of the {what} outside the stop", ours_ns, "before the window", before_ns, 1.10
            ),
            Row(f"p99 of the {what}, no window", before_ns, "without a session", without_ns, 1.10),
        ]
    stop_ms, save_ms = (
        statistics.median(each[part] for each in costs) / 1e6 for part in ("stop_ns", "save_ns")
    )
    print(
        f"\nthe stop: torch stops for {stop_ms:.0f} ms and writes for {save_ms:.0f} ms; the slowest request "
        f"took {statistics.median(stalls) * 1e3:.0f} ms (medians of the windows)"
    )
    return not report("A window on request", rows)


if __name__ == "__main__":
    sys.exit(main())
